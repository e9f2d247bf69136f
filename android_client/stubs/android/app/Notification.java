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
            public Builder(Icon a, CharSequence b, PendingIntent c) {}

            public Notification.Action build() {
                throw Unknown.body();
            }
        }
    }

    public static class BigTextStyle extends Notification.Style {
        public BigTextStyle() {}

        public Notification.BigTextStyle bigText(CharSequence a) {
            throw Unknown.body();
        }
    }

    public static class Builder {
        public Builder(Context a) {}

        public Builder(Context a, String b) {}

        public Notification.Builder addAction(Notification.Action a) {
            throw Unknown.body();
        }

        public Notification build() {
            throw Unknown.body();
        }

        public Notification.Builder setAutoCancel(boolean a) {
            throw Unknown.body();
        }

        public Notification.Builder setContentIntent(PendingIntent a) {
            throw Unknown.body();
        }

        public Notification.Builder setContentText(CharSequence a) {
            throw Unknown.body();
        }

        public Notification.Builder setContentTitle(CharSequence a) {
            throw Unknown.body();
        }

        public Notification.Builder setOngoing(boolean a) {
            throw Unknown.body();
        }

        public Notification.Builder setOnlyAlertOnce(boolean a) {
            throw Unknown.body();
        }

        public Notification.Builder setShowWhen(boolean a) {
            throw Unknown.body();
        }

        public Notification.Builder setSmallIcon(int a) {
            throw Unknown.body();
        }

        public Notification.Builder setStyle(Notification.Style a) {
            throw Unknown.body();
        }

        public Notification.Builder setVisibility(int a) {
            throw Unknown.body();
        }
    }

    public static abstract class Style {
        Style() {}
    }
}
