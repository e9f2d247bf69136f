package ai.onnxruntime;

import java.util.Map;
import java.util.Set;
import stub.Unknown;

public class OrtSession implements AutoCloseable {
    OrtSession() {}

    public Map<String, NodeInfo> getInputInfo() throws OrtException {
        throw Unknown.body();
    }

    public Set<String> getOutputNames() {
        throw Unknown.body();
    }

    public OrtSession.Result run(
            Map<String, ? extends OnnxTensorLike> given, Set<String> wanted)
            throws OrtException {
        throw Unknown.body();
    }

    @Override
    public void close() throws OrtException {
        throw Unknown.body();
    }

    public static class SessionOptions implements AutoCloseable {
        public SessionOptions() {
            throw Unknown.body();
        }

        public void setIntraOpNumThreads(int threads) throws OrtException {
            throw Unknown.body();
        }

        public void setInterOpNumThreads(int threads) throws OrtException {
            throw Unknown.body();
        }

        public void setMemoryPatternOptimization(boolean on) throws OrtException {
            throw Unknown.body();
        }

        public void setCPUArenaAllocator(boolean on) throws OrtException {
            throw Unknown.body();
        }

        public void setSessionLogLevel(OrtLoggingLevel level) throws OrtException {
            throw Unknown.body();
        }

        public void addConfigEntry(String key, String value) throws OrtException {
            throw Unknown.body();
        }

        @Override
        public void close() {
            throw Unknown.body();
        }
    }

    public static class Result implements AutoCloseable {
        Result() {}

        public OnnxValue get(int place) {
            throw Unknown.body();
        }

        @Override
        public void close() {
            throw Unknown.body();
        }
    }
}
