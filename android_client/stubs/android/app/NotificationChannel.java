package android.app;

import stub.Unknown;

public final class NotificationChannel {
    public NotificationChannel(String a, CharSequence b, int c) {}

    public void setDescription(String a) {
        throw Unknown.body();
    }

    public void setShowBadge(boolean a) {
        throw Unknown.body();
    }
}
