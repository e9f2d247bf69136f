package android.os;

import stub.Unknown;

public class Handler {
    public Handler(Looper looper) {}

    public final boolean post(Runnable r) {
        throw Unknown.body();
    }

    public final boolean postDelayed(Runnable r, long delayMillis) {
        throw Unknown.body();
    }

    public final void removeCallbacks(Runnable r) {
        throw Unknown.body();
    }
}
