package android.app;

import stub.Unknown;

public class AlarmManager {
    public static final int ELAPSED_REALTIME_WAKEUP = Unknown.INT;

    AlarmManager() {}

    public void cancel(PendingIntent operation) {
        throw Unknown.body();
    }

    public void setAndAllowWhileIdle(int type, long triggerAtMillis, PendingIntent operation) {
        throw Unknown.body();
    }
}
