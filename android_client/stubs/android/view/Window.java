package android.view;

import stub.Unknown;

public abstract class Window {
    Window() {}

    public void addFlags(int flags) {
        throw Unknown.body();
    }

    public void clearFlags(int flags) {
        throw Unknown.body();
    }
}
