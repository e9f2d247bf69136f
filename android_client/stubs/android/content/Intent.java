package android.content;

import android.net.Uri;
import stub.Unknown;

public class Intent {
    public static final String ACTION_BATTERY_CHANGED = Unknown.TEXT;
    public static final String ACTION_CREATE_DOCUMENT = Unknown.TEXT;
    public static final String ACTION_POWER_CONNECTED = Unknown.TEXT;
    public static final String ACTION_POWER_DISCONNECTED = Unknown.TEXT;
    public static final String ACTION_SEND = Unknown.TEXT;
    public static final String CATEGORY_OPENABLE = Unknown.TEXT;
    public static final String EXTRA_SUBJECT = Unknown.TEXT;
    public static final String EXTRA_TEXT = Unknown.TEXT;
    public static final String EXTRA_TITLE = Unknown.TEXT;
    public static final int FLAG_ACTIVITY_LAUNCHED_FROM_HISTORY = Unknown.INT;

    public Intent(String action) {}

    public Intent(Context packageContext, Class<?> cls) {}

    public static Intent createChooser(Intent target, CharSequence title) {
        throw Unknown.body();
    }

    public Intent addCategory(String category) {
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

    public int getIntExtra(String name, int defaultValue) {
        throw Unknown.body();
    }

    public String getStringExtra(String name) {
        throw Unknown.body();
    }

    public Intent putExtra(String name, String value) {
        throw Unknown.body();
    }

    public Intent setAction(String action) {
        throw Unknown.body();
    }

    public Intent setType(String type) {
        throw Unknown.body();
    }
}
