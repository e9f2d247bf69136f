package android.app;

import stub.Unknown;

public class NotificationManager {
    public static final int IMPORTANCE_LOW = Unknown.INT;

    NotificationManager() {}

    public void createNotificationChannel(NotificationChannel channel) {
        throw Unknown.body();
    }

    public void notify(int id, Notification notification) {
        throw Unknown.body();
    }
}
