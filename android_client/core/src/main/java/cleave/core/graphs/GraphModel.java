package cleave.core.graphs;

import cleave.core.graphs.ProtobufFields.ProtobufException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;

/** A graph as its bytes say it, with its own arrays and operations. */
final class GraphModel {
    /** An input of the model. */
    static final class Input {
        final int type;

        /** A negative one is not fixed. */
        final List<Long> sizes;

        /** Which of its sizes are not fixed. */
        final List<Boolean> open;

        Input(int type, List<Long> sizes, List<Boolean> open) {
            this.type = type;
            this.sizes = sizes;
            this.open = open;
        }
    }

    /** Versions of ONNX's operations that the sizes of arrays are known for. */
    private static final long FIRST_OPSET = 18;

    private static final long LAST_OPSET = 23;
    private static final int MOST_INTEGERS = 4096; // of an attribute

    final Map<String, Input> inputs = new LinkedHashMap<>();
    final List<String> outputs = new ArrayList<>();
    final Map<String, Sized> constants = new HashMap<>();
    final List<Operation> operations = new ArrayList<>();

    /** @param inside whether an operation holds the graph, and says what its inputs are */
    GraphModel(ByteBuffer message, boolean inside) throws GraphException, ProtobufException {
        ProtobufFields fields = new ProtobufFields(message);
        while (fields.next()) {
            if (fields.isInteger()) {
                continue;
            }
            ByteBuffer value = fields.content();
            switch (fields.number()) {
                case OnnxFields.GRAPH_NODE:
                    operations.add(operation(value));
                    break;
                case OnnxFields.GRAPH_CONSTANT:
                    constants.put(name(value, OnnxFields.TENSOR_NAME), tensor(value));
                    break;
                case OnnxFields.GRAPH_INPUT:
                    String name = name(value, OnnxFields.VALUE_NAME);
                    if (inputs.containsKey(name)) {
                        throw UnboundedException.name("an input occurs twice");
                    }
                    inputs.put(name, inside ? null : input(value));
                    break;
                case OnnxFields.GRAPH_OUTPUT:
                    outputs.add(name(value, OnnxFields.VALUE_NAME));
                    break;
                default:
                    break;
            }
        }
    }

    /** The graph of a model. */
    static GraphModel of(ByteBuffer model) throws GraphException, ProtobufException {
        Set<Long> versions = new HashSet<>();
        ProtobufFields fields = new ProtobufFields(model);
        while (fields.next()) {
            if (fields.number() == OnnxFields.MODEL_OPSET) {
                long version = 0;
                ProtobufFields parts = new ProtobufFields(fields.content());
                while (parts.next()) {
                    if (parts.number() == OnnxFields.OPSET_VERSION && parts.isInteger()) {
                        version = parts.integer();
                    }
                }
                versions.add(version);
            }
        }
        long version = versions.size() == 1 ? versions.iterator().next() : 0;
        if (version < FIRST_OPSET || version > LAST_OPSET) {
            throw new UnboundedException(
                    "opset",
                    "a graph must use one of the ONNX operator sets " + FIRST_OPSET + " to "
                            + LAST_OPSET + ", but this one does not");
        }
        return new GraphModel(joined(model, OnnxFields.MODEL_GRAPH), false);
    }

    /** The names of arrays that graphs inside an operation take and do not make. */
    static Set<String> enclosed(Operation operation) throws GraphException, ProtobufException {
        Set<String> found = new HashSet<>();
        for (Operation.Attribute attribute : operation.attributes.values()) {
            if (!attribute.graph.hasRemaining()) {
                continue;
            }
            GraphModel graph = new GraphModel(attribute.graph, true);
            Set<String> own = new HashSet<>(graph.inputs.keySet());
            own.addAll(graph.constants.keySet());
            own.add("");
            for (Operation inner : graph.operations) {
                Set<String> taken = new HashSet<>(inner.inputs);
                taken.addAll(enclosed(inner));
                taken.removeAll(own);
                found.addAll(taken);
                own.addAll(inner.outputs);
            }
            Set<String> ends = new HashSet<>(graph.outputs);
            ends.removeAll(own);
            found.addAll(ends);
        }
        return found;
    }

    private static Operation operation(ByteBuffer message)
            throws GraphException, ProtobufException {
        Operation operation = new Operation();
        ProtobufFields fields = new ProtobufFields(message);
        while (fields.next()) {
            if (fields.isInteger()) {
                continue;
            }
            ByteBuffer value = fields.content();
            switch (fields.number()) {
                case OnnxFields.NODE_INPUT:
                    operation.inputs.add(text(value));
                    break;
                case OnnxFields.NODE_OUTPUT:
                    operation.outputs.add(text(value));
                    break;
                case OnnxFields.NODE_OPERATION:
                    operation.name = text(value);
                    break;
                case OnnxFields.NODE_ATTRIBUTE:
                    String name = name(value, OnnxFields.ATTRIBUTE_NAME);
                    if (operation.attributes.put(name, attribute(value)) != null) {
                        throw UnboundedException.name("an attribute occurs twice");
                    }
                    break;
                default:
                    break;
            }
        }
        return operation;
    }

    private static Operation.Attribute attribute(ByteBuffer message)
            throws GraphException, ProtobufException {
        Operation.Attribute found = new Operation.Attribute();
        ProtobufFields fields = new ProtobufFields(message);
        while (fields.next()) {
            if (fields.number() == OnnxFields.ATTRIBUTE_INTEGERS) {
                ProtobufFields.Integers integers = fields.integers();
                while (integers.hasNext()) {
                    found.integers.add(Sized.within(integers.next()));
                    if (found.integers.size() >= MOST_INTEGERS) {
                        throw UnboundedException.shape("an attribute has too many integers");
                    }
                }
            } else if (fields.number() == OnnxFields.ATTRIBUTE_INTEGER && fields.isInteger()) {
                found.integer = Sized.within(fields.integer());
            } else if (fields.number() == OnnxFields.ATTRIBUTE_TEXT && !fields.isInteger()) {
                found.text = text(fields.content());
            }
        }
        found.tensor = joined(message, OnnxFields.ATTRIBUTE_TENSOR);
        found.graph = joined(message, OnnxFields.ATTRIBUTE_GRAPH);
        return found;
    }

    /** What is known of a constant. */
    static Sized tensor(ByteBuffer message) throws GraphException, ProtobufException {
        List<Long> sizes = new ArrayList<>();
        List<Long> values = new ArrayList<>();
        long type = 0;
        ByteBuffer raw = ByteBuffer.allocate(0);
        ProtobufFields fields = new ProtobufFields(message);
        while (fields.next()) {
            switch (fields.number()) {
                case OnnxFields.TENSOR_SIZE:
                    add(sizes, fields.integers(), Sized.LARGEST_RANK + 1);
                    break;
                case OnnxFields.TENSOR_INT32:
                case OnnxFields.TENSOR_INT64:
                    add(values, fields.integers(), Sized.MOST_VALUES + 1);
                    break;
                case OnnxFields.TENSOR_TYPE:
                    type = fields.isInteger() ? fields.integer() : type;
                    break;
                case OnnxFields.TENSOR_BYTES:
                    raw = fields.content();
                    break;
                default:
                    break;
            }
        }
        long[] shape = sizes.stream().mapToLong(n -> n).toArray();
        Sized found = Sized.of((int) Math.max(-1, Math.min(type, Byte.MAX_VALUE)), shape);
        if (!Sized.isFollowed(found.type) || found.elements > Sized.MOST_VALUES) {
            return found;
        }
        long[] elements = values.stream().mapToLong(n -> n).toArray();
        if (raw.hasRemaining()) {
            elements = elements(raw, Sized.itemBytes(found.type));
        }
        return Sized.followed(found.type, shape, elements);
    }

    private static void add(List<Long> to, ProtobufFields.Integers integers, int most)
            throws ProtobufException {
        while (integers.hasNext()) {
            long next = integers.next();
            if (to.size() < most) {
                to.add(Sized.within(next));
            }
        }
    }

    /** Integers of 1, 4 or 8 bytes, little-endian; of more than are followed only some. */
    private static long[] elements(ByteBuffer raw, int bytes) {
        ByteBuffer from = raw.duplicate().order(ByteOrder.LITTLE_ENDIAN);
        long[] found = new long[Math.min(from.remaining() / bytes, Sized.MOST_VALUES + 1)];
        for (int i = 0; i < found.length; i++) {
            found[i] = bytes == 8 ? from.getLong() : bytes == 4 ? from.getInt() : from.get();
            found[i] = Sized.within(found[i]);
        }
        return found;
    }

    private static Input input(ByteBuffer message) throws GraphException, ProtobufException {
        ByteBuffer kind =
                joined(joined(message, OnnxFields.VALUE_TYPE), OnnxFields.TYPE_TENSOR);
        List<Long> sizes = new ArrayList<>();
        List<Boolean> open = new ArrayList<>();
        boolean shaped = false;
        long type = 0;
        ProtobufFields fields = new ProtobufFields(kind);
        while (fields.next()) {
            if (fields.number() == OnnxFields.TENSOR_TYPE_ELEMENT && fields.isInteger()) {
                type = fields.integer();
            } else if (fields.number() == OnnxFields.TENSOR_TYPE_SHAPE && !fields.isInteger()) {
                shaped = true;
                ProtobufFields parts = new ProtobufFields(fields.content());
                while (parts.next()) {
                    if (parts.number() == OnnxFields.SHAPE_SIZE
                            && !parts.isInteger()
                            && sizes.size() <= Sized.LARGEST_RANK) {
                        size(parts.content(), sizes, open);
                    }
                }
            }
        }
        if (!shaped) {
            throw UnboundedException.shape("an input has no shape");
        }
        return new Input((int) Math.max(-1, Math.min(type, Byte.MAX_VALUE)), sizes, open);
    }

    private static void size(ByteBuffer message, List<Long> sizes, List<Boolean> open)
            throws ProtobufException {
        long size = -1;
        boolean fixed = false;
        ProtobufFields fields = new ProtobufFields(message);
        while (fields.next()) {
            if (fields.number() == OnnxFields.SIZE_NUMBER && fields.isInteger()) {
                fixed = true;
                size = Sized.within(fields.integer());
            } else if (fields.number() == OnnxFields.SIZE_NAME && !fields.isInteger()) {
                fixed = false;
            }
        }
        sizes.add(size);
        open.add(!fixed);
    }

    /** A message's name: of several the last counts. */
    private static String name(ByteBuffer message, int number) throws ProtobufException {
        String found = "";
        ProtobufFields fields = new ProtobufFields(message);
        while (fields.next()) {
            if (fields.number() == number && !fields.isInteger()) {
                found = text(fields.content());
            }
        }
        return found;
    }

    /** A message in a message: of several, one after another, which is all of them. */
    private static ByteBuffer joined(ByteBuffer message, int number) throws ProtobufException {
        List<ByteBuffer> parts = new ArrayList<>();
        int bytes = 0;
        ProtobufFields fields = new ProtobufFields(message);
        while (fields.next()) {
            if (fields.number() == number && !fields.isInteger()) {
                parts.add(fields.content());
                bytes += fields.content().remaining();
            }
        }
        if (parts.size() == 1) {
            return parts.get(0);
        }
        byte[] found = new byte[bytes];
        ByteBuffer to = ByteBuffer.wrap(found);
        parts.forEach(to::put);
        return ByteBuffer.wrap(Arrays.copyOf(found, bytes));
    }

    private static String text(ByteBuffer value) {
        return StandardCharsets.UTF_8.decode(value.duplicate()).toString();
    }
}
