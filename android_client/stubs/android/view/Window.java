package android.view;

import stub.Unknown;

public abstract class Window {
    Window() {}

    public void addFlags(int a) {
        throw Unknown.body();
    }

    public void clearFlags(int a) {
        throw Unknown.body();
    }
}
