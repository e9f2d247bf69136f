package ai.onnxruntime;

import stub.Unknown;

public class OrtEnvironment {
    OrtEnvironment() {}

    public static OrtEnvironment getEnvironment(OrtLoggingLevel level) {
        throw Unknown.body();
    }

    public OrtSession createSession(byte[] model, OrtSession.SessionOptions options)
            throws OrtException {
        throw Unknown.body();
    }
}
