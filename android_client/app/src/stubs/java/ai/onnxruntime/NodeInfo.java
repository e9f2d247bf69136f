package ai.onnxruntime;

import stub.Unknown;

public class NodeInfo {
    NodeInfo() {}

    public String getName() {
        throw Unknown.body();
    }

    public ValueInfo getInfo() {
        throw Unknown.body();
    }
}
