package ai.onnxruntime;

import com.sun.jna.Pointer;

/**
 * For tests: this package is what the app uses of ONNX Runtime's classes for Java, with their
 * signatures, on top of the library for C. The property {@code onnxruntime} says which one.
 */
public class OrtEnvironment {
    private static OrtEnvironment only;

    final Pointer pointer;

    private OrtEnvironment(OrtLoggingLevel level) throws OrtException {
        pointer = Api.made(Api.CREATE_ENV, level.getValue(), "tests");
    }

    public static synchronized OrtEnvironment getEnvironment(OrtLoggingLevel level) {
        try {
            only = only == null ? new OrtEnvironment(level) : only;
            return only;
        } catch (OrtException error) {
            throw new IllegalStateException(error);
        }
    }

    public OrtSession createSession(byte[] model, OrtSession.SessionOptions options)
            throws OrtException {
        return new OrtSession(this, model, options);
    }
}
