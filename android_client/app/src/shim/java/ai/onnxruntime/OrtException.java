package ai.onnxruntime;

/** For tests: what ONNX Runtime refuses. */
public class OrtException extends Exception {
    private static final long serialVersionUID = 1;

    public OrtException(String text) {
        super(text);
    }
}
