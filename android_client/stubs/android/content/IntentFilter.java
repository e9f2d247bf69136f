package android.content;

import stub.Unknown;

public class IntentFilter {
    public IntentFilter(String a) {}

    public final void addAction(String a) {
        throw Unknown.body();
    }
}
