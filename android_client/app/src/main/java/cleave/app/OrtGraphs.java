package cleave.app;

import ai.onnxruntime.NodeInfo;
import ai.onnxruntime.OnnxJavaType;
import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtLoggingLevel;
import ai.onnxruntime.OrtSession;
import ai.onnxruntime.TensorInfo;
import cleave.core.graphs.ElementType;
import cleave.core.graphs.GraphException;
import cleave.core.graphs.GraphInput;
import cleave.core.graphs.GraphSession;
import cleave.core.graphs.OpenGraph;
import cleave.core.graphs.Value;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;

/**
 * Runs graphs with ONNX Runtime, on the processor. Only apps that Gradle builds have that library.
 * Untried on a phone: tests run it on a JVM, over the library for C.
 */
final class OrtGraphs implements OpenGraph {
    private static final int MOST_SHOWN = 300; // characters of an error

    private final int threads;

    OrtGraphs(int threads) {
        this.threads = threads;
    }

    @Override
    public GraphSession open(ByteBuffer model) throws GraphException {
        byte[] bytes = new byte[model.remaining()];
        model.duplicate().get(bytes);
        OrtLoggingLevel quiet = OrtLoggingLevel.ORT_LOGGING_LEVEL_FATAL; // what fails is thrown
        OrtEnvironment environment = OrtEnvironment.getEnvironment(quiet);
        OrtSession.SessionOptions options = new OrtSession.SessionOptions();
        try {
            options.setSessionLogLevel(quiet);
            options.setIntraOpNumThreads(threads);
            options.setInterOpNumThreads(1);
            // Both would hold what the largest run took, of each graph of each layer.
            options.setMemoryPatternOptimization(false);
            options.setCPUArenaAllocator(false);
            // A graph could name files of this phone as its constants; there is no such folder.
            options.addConfigEntry(
                    "session.model_external_initializers_file_folder_path", "/dev/null/nothing");
            // What looks like ONNX Runtime's own format was not checked as that.
            options.addConfigEntry("session.load_model_format", "ONNX");
            // What follows from constants would be made at once and held to the end, however large
            // it is; of equal arrays one would be held from its first use to its last.
            options.addConfigEntry(
                    "optimization.disable_specified_optimizers",
                    "ConstantFolding;CommonSubexpressionElimination");
            // Threads that spin while they wait would empty the battery.
            options.addConfigEntry("session.intra_op.allow_spinning", "0");
            OrtSession session = environment.createSession(bytes, options);
            return new Opened(environment, options, session, inputs(session));
        } catch (OrtException | RuntimeException error) {
            options.close();
            throw new GraphException("ONNX Runtime refuses the graph: " + text(error));
        }
    }

    private static List<GraphInput> inputs(OrtSession session) throws OrtException {
        List<GraphInput> inputs = new ArrayList<>();
        for (NodeInfo input : session.getInputInfo().values()) {
            // The graph was checked: all its inputs are arrays.
            TensorInfo info = (TensorInfo) input.getInfo();
            inputs.add(new GraphInput(input.getName(), info.getShape()));
        }
        return inputs;
    }

    private static String text(Exception error) {
        String line = String.valueOf(error.getMessage()).trim().split("\n", 2)[0];
        return line.substring(0, Math.min(MOST_SHOWN, line.length()));
    }

    private static final class Opened implements GraphSession {
        private final OrtEnvironment environment;
        private final OrtSession.SessionOptions options; // which must outlive the session
        private final OrtSession session;
        private final List<GraphInput> inputs;

        Opened(
                OrtEnvironment environment,
                OrtSession.SessionOptions options,
                OrtSession session,
                List<GraphInput> inputs) {
            this.environment = environment;
            this.options = options;
            this.session = session;
            this.inputs = inputs;
        }

        @Override
        public List<GraphInput> inputs() {
            return inputs;
        }

        @Override
        public List<String> outputs() {
            return new ArrayList<>(session.getOutputNames());
        }

        @Override
        public List<Value> run(Map<String, Value> given, List<String> wanted)
                throws GraphException {
            Map<String, OnnxTensor> tensors = new LinkedHashMap<>();
            try {
                for (Map.Entry<String, Value> input : given.entrySet()) {
                    tensors.put(input.getKey(), tensor(input.getValue()));
                }
                try (OrtSession.Result result =
                        session.run(tensors, new LinkedHashSet<>(wanted))) {
                    List<Value> found = new ArrayList<>();
                    for (int i = 0; i < wanted.size(); i++) {
                        found.add(value((OnnxTensor) result.get(i)));
                    }
                    return found;
                }
            } catch (OrtException | RuntimeException error) {
                throw new GraphException("the graph cannot be run: " + text(error));
            } finally {
                for (OnnxTensor tensor : tensors.values()) {
                    tensor.close();
                }
            }
        }

        @Override
        public void close() {
            try {
                session.close();
            } catch (OrtException error) {
                throw new IllegalStateException(error);
            } finally {
                options.close();
            }
        }

        /** The same elements, which are not copied. */
        private OnnxTensor tensor(Value value) throws OrtException {
            ByteBuffer data = value.data();
            if (value.type == ElementType.FLOAT32) {
                return OnnxTensor.createTensor(environment, data.asFloatBuffer(), value.shape());
            }
            if (value.type == ElementType.INT64) {
                return OnnxTensor.createTensor(environment, data.asLongBuffer(), value.shape());
            }
            OnnxJavaType bytes =
                    value.type == ElementType.BOOL ? OnnxJavaType.BOOL : OnnxJavaType.UINT8;
            return OnnxTensor.createTensor(environment, data, value.shape(), bytes);
        }

        /** A copy: the tensor's own memory goes with it. */
        private static Value value(OnnxTensor tensor) throws GraphException {
            TensorInfo info = tensor.getInfo();
            ByteBuffer elements = tensor.getByteBuffer();
            ByteBuffer data =
                    ByteBuffer.allocateDirect(elements.remaining())
                            .order(ByteOrder.LITTLE_ENDIAN);
            data.put(elements).flip();
            return new Value(type(info.type), info.getShape(), data);
        }

        private static ElementType type(OnnxJavaType type) throws GraphException {
            if (type == OnnxJavaType.FLOAT) {
                return ElementType.FLOAT32;
            }
            if (type == OnnxJavaType.INT64) {
                return ElementType.INT64;
            }
            if (type == OnnxJavaType.BOOL) {
                return ElementType.BOOL;
            }
            if (type == OnnxJavaType.UINT8) {
                return ElementType.UINT8;
            }
            throw new GraphException("an output has elements of the type " + type);
        }
    }
}
