package ai.onnxruntime;

/** For tests, like {@link OrtEnvironment}. */
public class NodeInfo {
    private final String name;
    private final ValueInfo info;

    NodeInfo(String name, ValueInfo info) {
        this.name = name;
        this.info = info;
    }

    public String getName() {
        return name;
    }

    public ValueInfo getInfo() {
        return info;
    }
}
