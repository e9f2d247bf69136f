package android.app;

import android.content.Context;
import android.content.Intent;
import stub.Unknown;

public final class PendingIntent {
    public static final int FLAG_IMMUTABLE = Unknown.INT;

    PendingIntent() {}

    public static PendingIntent getActivity(Context a, int b, Intent c, int d) {
        throw Unknown.body();
    }

    public static PendingIntent getService(Context a, int b, Intent c, int d) {
        throw Unknown.body();
    }
}
