/** Small ONNX models of one's own. */

import {
  AttributeField,
  GraphField,
  ModelField,
  NodeField,
  OpsetField,
  ShapeField,
  SizeField,
  TensorTypeField,
  TypeField,
  ValueField,
} from "./onnx_fields";
import { content, integer } from "./protobuf";

const IR_VERSION = 10;
const OPSET = 20;
const FLOAT = 1; // ONNX's number of the type
const INTEGER = 2; // likewise, of attributes

/** An operation of ONNX's default domain. */
export interface Node {
  readonly operation: string;
  readonly inputs: readonly string[];
  readonly outputs: readonly string[];
  /** Integers by name, from -1 on. */
  readonly attributes?: { readonly [name: string]: number };
}

/** fp32 arrays by name, in order: their sizes; one that is not fixed has a name. */
export interface Arrays {
  readonly [name: string]: readonly (number | string)[];
}

/** An ONNX model of operations, in an order in which they can be computed. */
export function written(nodes: readonly Node[], inputs: Arrays, outputs: Arrays): Uint8Array {
  const values = (field: GraphField, arrays: Arrays) =>
    Object.entries(arrays).map(([name, shape]) => content(field, valueOf(name, shape)));
  return Uint8Array.from([
    ...integer(ModelField.IR_VERSION, IR_VERSION),
    ...content(
      ModelField.GRAPH,
      ...nodes.map((node) => content(GraphField.NODE, nodeOf(node))),
      content(GraphField.NAME, "graph"),
      ...values(GraphField.INPUT, inputs),
      ...values(GraphField.OUTPUT, outputs),
    ),
    ...content(ModelField.OPSET, integer(OpsetField.VERSION, OPSET)),
  ]);
}

function nodeOf({ operation, inputs, outputs, attributes = {} }: Node): number[] {
  const parts = [
    ...inputs.map((name) => content(NodeField.INPUT, name)),
    ...outputs.map((name) => content(NodeField.OUTPUT, name)),
    content(NodeField.OPERATION, operation),
    ...Object.entries(attributes).map(([name, value]) =>
      content(
        NodeField.ATTRIBUTE,
        content(AttributeField.NAME, name),
        integer(AttributeField.INTEGER, value),
        integer(AttributeField.TYPE, INTEGER),
      ),
    ),
  ];
  return parts.flat();
}

function valueOf(name: string, shape: readonly (number | string)[]): number[] {
  const sizes = shape.map((size) =>
    content(
      ShapeField.SIZE,
      typeof size === "number" ? integer(SizeField.NUMBER, size) : content(SizeField.NAME, size),
    ),
  );
  const tensor = content(
    TypeField.TENSOR,
    integer(TensorTypeField.ELEMENT, FLOAT),
    content(TensorTypeField.SHAPE, ...sizes),
  );
  return [...content(ValueField.NAME, name), ...content(ValueField.TYPE, tensor)];
}
