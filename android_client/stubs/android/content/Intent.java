package android.content;

import android.net.Uri;
import stub.Unknown;

public class Intent {
    public static final String ACTION_BATTERY_CHANGED = Unknown.TEXT;
    public static final String ACTION_POWER_CONNECTED = Unknown.TEXT;
    public static final String ACTION_POWER_DISCONNECTED = Unknown.TEXT;
    public static final String ACTION_SEND = Unknown.TEXT;
    public static final String EXTRA_SUBJECT = Unknown.TEXT;
    public static final String EXTRA_TEXT = Unknown.TEXT;
    public static final int FLAG_ACTIVITY_LAUNCHED_FROM_HISTORY = Unknown.INT;

    public Intent(String a) {}

    public Intent(Context a, Class<?> b) {}

    public static Intent createChooser(Intent a, CharSequence b) {
        throw Unknown.body();
    }

    public String getAction() {
        throw Unknown.body();
    }

    public Uri getData() {
        throw Unknown.body();
    }

    public int getFlags() {
        throw Unknown.body();
    }

    public int getIntExtra(String a, int b) {
        throw Unknown.body();
    }

    public String getStringExtra(String a) {
        throw Unknown.body();
    }

    public Intent putExtra(String a, String b) {
        throw Unknown.body();
    }

    public Intent setAction(String a) {
        throw Unknown.body();
    }

    public Intent setType(String a) {
        throw Unknown.body();
    }
}
