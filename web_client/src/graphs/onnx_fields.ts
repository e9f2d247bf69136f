/** Numbers of the fields of ONNX's messages, as far as they are read or written here. */

export enum ModelField {
  IR_VERSION = 1,
  GRAPH = 7,
  OPSET = 8,
  TRAINING = 20,
  FUNCTION = 25,
}

export enum OpsetField {
  DOMAIN = 1,
  VERSION = 2,
}

export enum GraphField {
  NODE = 1,
  NAME = 2,
  CONSTANT = 5,
  INPUT = 11,
  OUTPUT = 12,
  SPARSE_CONSTANT = 15,
}

export enum NodeField {
  INPUT = 1,
  OUTPUT = 2,
  OPERATION = 4,
  ATTRIBUTE = 5,
  DOMAIN = 7,
}

export enum AttributeField {
  NAME = 1,
  INTEGER = 3,
  TEXT = 4,
  TENSOR = 5,
  GRAPH = 6,
  INTEGERS = 8,
  TENSORS = 10,
  GRAPHS = 11,
  TYPE = 20,
  SPARSE_TENSOR = 22,
  SPARSE_TENSORS = 23,
}

export enum TensorField {
  SIZE = 1,
  TYPE = 2,
  INT32 = 5,
  INT64 = 7,
  NAME = 8,
  BYTES = 9,
  EXTERNAL_DATA = 13,
  DATA_LOCATION = 14,
}

export enum ValueField {
  NAME = 1,
  TYPE = 2,
}

export enum TypeField {
  TENSOR = 1,
  DENOTATION = 6,
}

export enum TensorTypeField {
  ELEMENT = 1,
  SHAPE = 2,
}

export enum ShapeField {
  SIZE = 1,
}

export enum SizeField {
  NUMBER = 1,
  NAME = 2,
}
