package android.content;

import stub.Unknown;

public class IntentFilter {
    public IntentFilter(String action) {}

    public final void addAction(String action) {
        throw Unknown.body();
    }
}
