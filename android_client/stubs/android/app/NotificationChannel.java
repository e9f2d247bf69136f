package android.app;

import stub.Unknown;

public final class NotificationChannel {
    public NotificationChannel(String id, CharSequence name, int importance) {}

    public void setDescription(String description) {
        throw Unknown.body();
    }

    public void setShowBadge(boolean showBadge) {
        throw Unknown.body();
    }
}
