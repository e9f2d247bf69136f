package cleave.core.graphs;

/** Numbers of the fields of ONNX's messages, as far as they are read or written here. */
final class OnnxFields {
    static final int MODEL_IR_VERSION = 1;
    static final int MODEL_GRAPH = 7;
    static final int MODEL_OPSET = 8;
    static final int MODEL_TRAINING = 20;
    static final int MODEL_FUNCTION = 25;

    static final int OPSET_DOMAIN = 1;
    static final int OPSET_VERSION = 2;

    static final int GRAPH_NODE = 1;
    static final int GRAPH_NAME = 2;
    static final int GRAPH_CONSTANT = 5;
    static final int GRAPH_INPUT = 11;
    static final int GRAPH_OUTPUT = 12;
    static final int GRAPH_SPARSE_CONSTANT = 15;

    static final int NODE_INPUT = 1;
    static final int NODE_OUTPUT = 2;
    static final int NODE_OPERATION = 4;
    static final int NODE_ATTRIBUTE = 5;
    static final int NODE_DOMAIN = 7;

    static final int ATTRIBUTE_NAME = 1;
    static final int ATTRIBUTE_INTEGER = 3;
    static final int ATTRIBUTE_TEXT = 4;
    static final int ATTRIBUTE_TENSOR = 5;
    static final int ATTRIBUTE_GRAPH = 6;
    static final int ATTRIBUTE_INTEGERS = 8;
    static final int ATTRIBUTE_TENSORS = 10;
    static final int ATTRIBUTE_GRAPHS = 11;
    static final int ATTRIBUTE_SPARSE_TENSOR = 22;
    static final int ATTRIBUTE_SPARSE_TENSORS = 23;

    static final int TENSOR_SIZE = 1;
    static final int TENSOR_TYPE = 2;
    static final int TENSOR_INT32 = 5;
    static final int TENSOR_INT64 = 7;
    static final int TENSOR_NAME = 8;
    static final int TENSOR_BYTES = 9;
    static final int TENSOR_EXTERNAL_DATA = 13;
    static final int TENSOR_DATA_LOCATION = 14;

    static final int VALUE_NAME = 1;
    static final int VALUE_TYPE = 2;

    static final int TYPE_TENSOR = 1;
    static final int TYPE_DENOTATION = 6;

    static final int TENSOR_TYPE_ELEMENT = 1;
    static final int TENSOR_TYPE_SHAPE = 2;

    static final int SHAPE_SIZE = 1;

    static final int SIZE_NUMBER = 1;
    static final int SIZE_NAME = 2;

    private OnnxFields() {}
}
