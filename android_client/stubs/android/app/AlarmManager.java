package android.app;

import stub.Unknown;

public class AlarmManager {
    public static final int ELAPSED_REALTIME_WAKEUP = Unknown.INT;

    AlarmManager() {}

    public void cancel(PendingIntent a) {
        throw Unknown.body();
    }

    public void setAndAllowWhileIdle(int a, long b, PendingIntent c) {
        throw Unknown.body();
    }
}
