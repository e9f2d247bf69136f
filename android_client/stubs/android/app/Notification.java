package android.app;

import android.content.Context;
import android.graphics.drawable.Icon;
import stub.Unknown;

public class Notification {
    public static final int VISIBILITY_PUBLIC = Unknown.INT;

    Notification() {}

    public static class Action {
        Action() {}

        public static final class Builder {
            public Builder(Icon icon, CharSequence title, PendingIntent intent) {}

            public Notification.Action build() {
                throw Unknown.body();
            }
        }
    }

    public static class BigTextStyle extends Notification.Style {
        public BigTextStyle() {}

        public Notification.BigTextStyle bigText(CharSequence cs) {
            throw Unknown.body();
        }
    }

    public static class Builder {
        public Builder(Context context) {}

        public Builder(Context context, String channelId) {}

        public Notification.Builder addAction(Notification.Action action) {
            throw Unknown.body();
        }

        public Notification build() {
            throw Unknown.body();
        }

        public Notification.Builder setAutoCancel(boolean autoCancel) {
            throw Unknown.body();
        }

        public Notification.Builder setContentIntent(PendingIntent intent) {
            throw Unknown.body();
        }

        public Notification.Builder setContentText(CharSequence text) {
            throw Unknown.body();
        }

        public Notification.Builder setContentTitle(CharSequence title) {
            throw Unknown.body();
        }

        public Notification.Builder setOngoing(boolean ongoing) {
            throw Unknown.body();
        }

        public Notification.Builder setOnlyAlertOnce(boolean onlyAlertOnce) {
            throw Unknown.body();
        }

        public Notification.Builder setShowWhen(boolean show) {
            throw Unknown.body();
        }

        public Notification.Builder setSmallIcon(int icon) {
            throw Unknown.body();
        }

        public Notification.Builder setStyle(Notification.Style style) {
            throw Unknown.body();
        }

        public Notification.Builder setVisibility(int visibility) {
            throw Unknown.body();
        }
    }

    public static abstract class Style {
        Style() {}
    }
}
