package ai.onnxruntime;

import com.sun.jna.Memory;
import com.sun.jna.Native;
import com.sun.jna.Pointer;
import com.sun.jna.StringArray;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;

/** For tests, like {@link OrtEnvironment}. */
public class OrtSession implements AutoCloseable {
    private final Pointer pointer;

    OrtSession(OrtEnvironment env, byte[] model, SessionOptions options) throws OrtException {
        Memory bytes = new Memory(Math.max(1, model.length));
        bytes.write(0, model, 0, model.length);
        long length = model.length;
        pointer =
                Api.made(
                        Api.CREATE_SESSION_FROM_ARRAY,
                        env.pointer,
                        bytes,
                        length,
                        options.pointer);
    }

    /** By name, in the graph's order. */
    public Map<String, NodeInfo> getInputInfo() throws OrtException {
        Map<String, NodeInfo> found = new LinkedHashMap<>();
        long count = Api.number(Api.SESSION_GET_INPUT_COUNT, pointer);
        for (long i = 0; i < count; i++) {
            String name = name(Api.SESSION_GET_INPUT_NAME, i);
            Pointer type = Api.made(Api.SESSION_GET_INPUT_TYPE_INFO, pointer, i);
            Pointer tensor = Api.made(Api.CAST_TYPE_INFO_TO_TENSOR_INFO, type);
            found.put(name, new NodeInfo(name, new TensorInfo(tensor)));
            Api.release(Api.RELEASE_TYPE_INFO, type);
        }
        return found;
    }

    /** In the graph's order. */
    public Set<String> getOutputNames() {
        try {
            Set<String> names = new LinkedHashSet<>();
            long count = Api.number(Api.SESSION_GET_OUTPUT_COUNT, pointer);
            for (long i = 0; i < count; i++) {
                names.add(name(Api.SESSION_GET_OUTPUT_NAME, i));
            }
            return names;
        } catch (OrtException error) {
            throw new IllegalStateException(error);
        }
    }

    public Result run(Map<String, ? extends OnnxTensorLike> given, Set<String> wanted)
            throws OrtException {
        Memory inputs = pointers(given.size());
        int next = 0;
        for (OnnxTensorLike value : given.values()) {
            inputs.setPointer((long) next++ * Native.POINTER_SIZE, value.pointer);
        }
        Memory outputs = pointers(wanted.size());
        Api.call(
                Api.RUN,
                pointer,
                Pointer.NULL,
                new StringArray(given.keySet().toArray(new String[0])),
                inputs,
                (long) given.size(),
                new StringArray(wanted.toArray(new String[0])),
                (long) wanted.size(),
                outputs);
        List<OnnxValue> found = new ArrayList<>();
        for (int i = 0; i < wanted.size(); i++) {
            Pointer value = outputs.getPointer((long) i * Native.POINTER_SIZE);
            found.add(new OnnxTensor(value, null));
        }
        return new Result(found);
    }

    @Override
    public void close() throws OrtException {
        Api.release(Api.RELEASE_SESSION, pointer);
    }

    private String name(int function, long place) throws OrtException {
        Pointer allocator = Api.made(Api.GET_ALLOCATOR_WITH_DEFAULT_OPTIONS);
        Pointer text = Api.made(function, pointer, place, allocator);
        String name = text.getString(0, "UTF-8");
        Api.call(Api.ALLOCATOR_FREE, allocator, text);
        return name;
    }

    private static Memory pointers(int count) {
        Memory memory = new Memory((long) Math.max(1, count) * Native.POINTER_SIZE);
        memory.clear();
        return memory;
    }

    /** For tests, like {@link OrtEnvironment}. */
    public static class SessionOptions implements AutoCloseable {
        final Pointer pointer;

        public SessionOptions() {
            try {
                pointer = Api.made(Api.CREATE_SESSION_OPTIONS);
            } catch (OrtException error) {
                throw new IllegalStateException(error);
            }
        }

        public void setIntraOpNumThreads(int threads) throws OrtException {
            Api.call(Api.SET_INTRA_OP_NUM_THREADS, pointer, threads);
        }

        public void setInterOpNumThreads(int threads) throws OrtException {
            Api.call(Api.SET_INTER_OP_NUM_THREADS, pointer, threads);
        }

        public void setMemoryPatternOptimization(boolean on) throws OrtException {
            Api.call(on ? Api.ENABLE_MEM_PATTERN : Api.DISABLE_MEM_PATTERN, pointer);
        }

        public void setCPUArenaAllocator(boolean on) throws OrtException {
            Api.call(on ? Api.ENABLE_CPU_MEM_ARENA : Api.DISABLE_CPU_MEM_ARENA, pointer);
        }

        public void setSessionLogLevel(OrtLoggingLevel level) throws OrtException {
            Api.call(Api.SET_SESSION_LOG_SEVERITY_LEVEL, pointer, level.getValue());
        }

        public void addConfigEntry(String key, String value) throws OrtException {
            Api.call(Api.ADD_SESSION_CONFIG_ENTRY, pointer, key, value);
        }

        @Override
        public void close() {
            Api.release(Api.RELEASE_SESSION_OPTIONS, pointer);
        }
    }

    /** For tests, like {@link OrtEnvironment}. */
    public static class Result implements AutoCloseable {
        private final List<OnnxValue> values;

        Result(List<OnnxValue> values) {
            this.values = values;
        }

        public OnnxValue get(int place) {
            return values.get(place);
        }

        @Override
        public void close() {
            values.forEach(OnnxValue::close);
        }
    }
}
