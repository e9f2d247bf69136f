package cleave.core.graphs;

import cleave.core.graphs.ProtobufFields.ProtobufException;
import cleave.core.protocol.Limits;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashSet;
import java.util.Set;

/**
 * Looks at a model before a large library does: whether it is a graph, and bounded. {@code
 * cleave/device/compute_thread.py} is the same in Python. A field that should come once may come
 * again, and readers then take all of it; so does this.
 */
public final class GraphCheck {
    /** Operations that draw at random, and the one that may go on for ever. */
    private static final Set<String> REFUSED_OPERATIONS =
            Collections.unmodifiableSet(
                    new HashSet<>(
                            Arrays.asList(
                                    "Bernoulli",
                                    "Multinomial",
                                    "RandomNormal",
                                    "RandomNormalLike",
                                    "RandomUniform",
                                    "RandomUniformLike",
                                    "Dropout",
                                    "Loop")));

    private static final int MOST_SHOWN = 60; // bytes of a text
    private static final int MOST_ELEMENTS_OF_A_BYTE = 2; // of the smallest types
    private static final String SPARSE =
            "a graph has no sparse constants, and this model has some";
    private static final String IN_A_FILE =
            "a graph reads no files, and a constant of this model is in one";

    private int nodes; // at any depth

    private GraphCheck() {}

    /**
     * Refuse a model that is no graph as docs/protocol.md (<i>Graphs</i>) has it. It takes time in
     * proportion to the model's length, and no memory.
     *
     * @param model from position to limit
     * @throws GraphException when it is no ONNX model, or has what graphs do not have; says what
     */
    public static void check(ByteBuffer model) throws GraphException {
        try {
            new GraphCheck().model(model);
        } catch (ProtobufException error) {
            throw new GraphException("it is not an ONNX model: " + error.getMessage());
        }
    }

    private void model(ByteBuffer model) throws GraphException, ProtobufException {
        boolean graph = false;
        ProtobufFields fields = new ProtobufFields(model);
        while (fields.next()) {
            switch (fields.number()) {
                case OnnxFields.MODEL_GRAPH:
                    graph = true;
                    graph(fields.content(), 1);
                    break;
                case OnnxFields.MODEL_OPSET:
                    opset(fields.content());
                    break;
                case OnnxFields.MODEL_FUNCTION:
                    throw new GraphException(
                            "a graph has no functions of its own, and this model has some");
                case OnnxFields.MODEL_TRAINING:
                    throw new GraphException(
                            "a graph does not say how it is trained, and this model does");
                default:
                    break;
            }
        }
        if (!graph) {
            throw new GraphException("it is not an ONNX model: it holds no graph");
        }
    }

    private static void opset(ByteBuffer opset) throws GraphException, ProtobufException {
        ProtobufFields fields = new ProtobufFields(opset);
        while (fields.next()) {
            if (fields.number() == OnnxFields.OPSET_DOMAIN) {
                checkDomain(fields.content());
            }
        }
    }

    private void graph(ByteBuffer graph, int depth) throws GraphException, ProtobufException {
        if (depth > Limits.MAX_GRAPH_DEPTH) {
            throw new GraphException(
                    "graphs stand in it more than " + Limits.MAX_GRAPH_DEPTH + " deep");
        }
        ProtobufFields fields = new ProtobufFields(graph);
        while (fields.next()) {
            switch (fields.number()) {
                case OnnxFields.GRAPH_NODE:
                    node(fields.content(), depth);
                    break;
                case OnnxFields.GRAPH_CONSTANT:
                    checkTensor(fields.content());
                    break;
                case OnnxFields.GRAPH_SPARSE_CONSTANT:
                    throw new GraphException(SPARSE);
                case OnnxFields.GRAPH_INPUT:
                case OnnxFields.GRAPH_OUTPUT:
                    checkValue(fields.content());
                    break;
                default:
                    break;
            }
        }
    }

    private void node(ByteBuffer node, int depth) throws GraphException, ProtobufException {
        nodes += 1;
        if (nodes > Limits.MAX_GRAPH_NODES) {
            throw new GraphException("it has more than " + Limits.MAX_GRAPH_NODES + " operations");
        }
        ProtobufFields fields = new ProtobufFields(node);
        while (fields.next()) {
            switch (fields.number()) {
                case OnnxFields.NODE_OPERATION:
                    String operation = text(fields.content());
                    if (REFUSED_OPERATIONS.contains(operation)) {
                        throw new GraphException("a graph has no operation " + operation);
                    }
                    break;
                case OnnxFields.NODE_DOMAIN:
                    checkDomain(fields.content());
                    break;
                case OnnxFields.NODE_ATTRIBUTE:
                    attribute(fields.content(), depth);
                    break;
                default:
                    break;
            }
        }
    }

    private void attribute(ByteBuffer attribute, int depth)
            throws GraphException, ProtobufException {
        ProtobufFields fields = new ProtobufFields(attribute);
        while (fields.next()) {
            switch (fields.number()) {
                case OnnxFields.ATTRIBUTE_GRAPH:
                case OnnxFields.ATTRIBUTE_GRAPHS:
                    graph(fields.content(), depth + 1);
                    break;
                case OnnxFields.ATTRIBUTE_TENSOR:
                case OnnxFields.ATTRIBUTE_TENSORS:
                    checkTensor(fields.content());
                    break;
                case OnnxFields.ATTRIBUTE_SPARSE_TENSOR:
                case OnnxFields.ATTRIBUTE_SPARSE_TENSORS:
                    throw new GraphException(SPARSE);
                default:
                    break;
            }
        }
    }

    /** Refuse a constant that is in a file, or larger than its bytes. */
    private static void checkTensor(ByteBuffer tensor) throws GraphException, ProtobufException {
        long most = (long) MOST_ELEMENTS_OF_A_BYTE * tensor.remaining();
        long elements = 1;
        boolean empty = false;
        ProtobufFields fields = new ProtobufFields(tensor);
        while (fields.next()) {
            switch (fields.number()) {
                case OnnxFields.TENSOR_SIZE:
                    ProtobufFields.Integers sizes = fields.integers();
                    while (sizes.hasNext()) {
                        long size = sizes.next();
                        empty |= size == 0;
                        // Sizes have no sign here; a product of what is left fits 64 bits.
                        boolean large = size < 0 || size > most;
                        long times = Math.min(elements * Math.max(size, 1), most + 1);
                        elements = large ? most + 1 : times;
                    }
                    break;
                case OnnxFields.TENSOR_EXTERNAL_DATA:
                    throw new GraphException(IN_A_FILE);
                case OnnxFields.TENSOR_DATA_LOCATION:
                    if (fields.isSomething()) {
                        throw new GraphException(IN_A_FILE);
                    }
                    break;
                default:
                    break;
            }
        }
        if (elements > most && !empty) {
            throw new GraphException(
                    "a constant is larger than its " + tensor.remaining() + " bytes");
        }
    }

    /** Refuse an input or output that is not an array, but a list of them or the like. */
    private static void checkValue(ByteBuffer value) throws GraphException, ProtobufException {
        ProtobufFields fields = new ProtobufFields(value);
        while (fields.next()) {
            if (fields.number() != OnnxFields.VALUE_TYPE) {
                continue;
            }
            ProtobufFields kinds = new ProtobufFields(fields.content());
            while (kinds.next()) {
                if (kinds.number() != OnnxFields.TYPE_TENSOR
                        && kinds.number() != OnnxFields.TYPE_DENOTATION) {
                    throw new GraphException(
                            "inputs and outputs of a graph are arrays, and not all here");
                }
            }
        }
    }

    private static void checkDomain(ByteBuffer value) throws GraphException {
        String domain = text(value);
        if (!domain.isEmpty() && !domain.equals("ai.onnx")) {
            throw new GraphException(
                    "a graph has operations of ONNX's default domain alone, and this model names '"
                            + domain + "'");
        }
    }

    /** A short text as it may be shown. */
    private static String text(ByteBuffer value) {
        byte[] some = new byte[Math.min(value.remaining(), MOST_SHOWN)];
        value.duplicate().get(some);
        return new String(some, StandardCharsets.UTF_8);
    }
}
