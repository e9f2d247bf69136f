package cleave.core.graphs;

import java.nio.ByteBuffer;

/** Writes a small ONNX model: operations of its default domain on fp32 arrays. */
final class GraphWriter {
    /** A size that may be any. */
    static final long BATCH = -1;

    private static final int IR_VERSION = 10;
    private static final int OPSET = 20;
    private static final int FLOAT = 1; // ONNX's number of the type

    private final ProtobufWriter graph =
            new ProtobufWriter().text(OnnxFields.GRAPH_NAME, "graph");

    GraphWriter input(String name, long... shape) {
        graph.message(OnnxFields.GRAPH_INPUT, value(name, shape));
        return this;
    }

    GraphWriter output(String name, long... shape) {
        graph.message(OnnxFields.GRAPH_OUTPUT, value(name, shape));
        return this;
    }

    /** Add an operation; those that it needs come before it. */
    GraphWriter node(String operation, String output, String... inputs) {
        ProtobufWriter node = new ProtobufWriter();
        for (String input : inputs) {
            node.text(OnnxFields.NODE_INPUT, input);
        }
        node.text(OnnxFields.NODE_OUTPUT, output).text(OnnxFields.NODE_OPERATION, operation);
        graph.message(OnnxFields.GRAPH_NODE, node);
        return this;
    }

    ByteBuffer model() {
        ProtobufWriter opset = new ProtobufWriter().integer(OnnxFields.OPSET_VERSION, OPSET);
        return ByteBuffer.wrap(
                new ProtobufWriter()
                        .integer(OnnxFields.MODEL_IR_VERSION, IR_VERSION)
                        .message(OnnxFields.MODEL_GRAPH, graph)
                        .message(OnnxFields.MODEL_OPSET, opset)
                        .written());
    }

    private static ProtobufWriter value(String name, long[] sizes) {
        ProtobufWriter shape = new ProtobufWriter();
        for (long size : sizes) {
            ProtobufWriter written = new ProtobufWriter();
            if (size == BATCH) {
                written.text(OnnxFields.SIZE_NAME, "batch");
            } else {
                written.integer(OnnxFields.SIZE_NUMBER, size);
            }
            shape.message(OnnxFields.SHAPE_SIZE, written);
        }
        ProtobufWriter tensor =
                new ProtobufWriter()
                        .integer(OnnxFields.TENSOR_TYPE_ELEMENT, FLOAT)
                        .message(OnnxFields.TENSOR_TYPE_SHAPE, shape);
        return new ProtobufWriter()
                .text(OnnxFields.VALUE_NAME, name)
                .message(
                        OnnxFields.VALUE_TYPE,
                        new ProtobufWriter().message(OnnxFields.TYPE_TENSOR, tensor));
    }
}
