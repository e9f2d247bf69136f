package android.os;

import stub.Unknown;

public class Handler {
    public Handler(Looper a) {}

    public final boolean post(Runnable a) {
        throw Unknown.body();
    }

    public final boolean postDelayed(Runnable a, long b) {
        throw Unknown.body();
    }

    public final void removeCallbacks(Runnable a) {
        throw Unknown.body();
    }
}
