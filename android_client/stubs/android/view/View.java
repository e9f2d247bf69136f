package android.view;

import android.content.Context;
import stub.Unknown;

public class View {
    public static final int GONE = Unknown.INT;
    public static final int VISIBLE = Unknown.INT;

    public View(Context context) {}

    public final boolean requestFocus() {
        throw Unknown.body();
    }

    public void setFilterTouchesWhenObscured(boolean enabled) {
        throw Unknown.body();
    }

    public void setOnClickListener(View.OnClickListener l) {
        throw Unknown.body();
    }

    public void setOnFocusChangeListener(View.OnFocusChangeListener l) {
        throw Unknown.body();
    }

    public void setVisibility(int visibility) {
        throw Unknown.body();
    }

    public interface OnClickListener {
        void onClick(View view);
    }

    public interface OnFocusChangeListener {
        void onFocusChange(View view, boolean on);
    }
}
