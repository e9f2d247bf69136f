package android.widget;

import android.content.Context;
import stub.Unknown;

public class Toast {
    public static final int LENGTH_LONG = Unknown.INT;

    Toast() {}

    public static Toast makeText(Context context, CharSequence text, int duration) {
        throw Unknown.body();
    }

    public static Toast makeText(Context context, int resId, int duration) {
        throw Unknown.body();
    }

    public void show() {
        throw Unknown.body();
    }
}
