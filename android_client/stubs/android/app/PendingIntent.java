package android.app;

import android.content.Context;
import android.content.Intent;
import stub.Unknown;

public final class PendingIntent {
    public static final int FLAG_IMMUTABLE = Unknown.INT;

    PendingIntent() {}

    public static PendingIntent getActivity(
            Context context, int requestCode, Intent intent, int flags) {
        throw Unknown.body();
    }

    public static PendingIntent getService(
            Context context, int requestCode, Intent intent, int flags) {
        throw Unknown.body();
    }
}
