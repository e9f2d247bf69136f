package android.content.res;

import stub.Unknown;

public class Resources {
    Resources() {}

    public Configuration getConfiguration() {
        throw Unknown.body();
    }

    public String getString(int id) {
        throw Unknown.body();
    }

    public String getString(int id, Object... formatArgs) {
        throw Unknown.body();
    }
}
