package android.app;

import stub.Unknown;

public class NotificationManager {
    public static final int IMPORTANCE_LOW = Unknown.INT;

    NotificationManager() {}

    public void createNotificationChannel(NotificationChannel a) {
        throw Unknown.body();
    }

    public void notify(int a, Notification b) {
        throw Unknown.body();
    }
}
