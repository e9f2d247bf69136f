package android.os;

import stub.Unknown;

public final class SystemClock {
    SystemClock() {}

    public static long elapsedRealtime() {
        throw Unknown.body();
    }

    public static long elapsedRealtimeNanos() {
        throw Unknown.body();
    }
}
