package android.view;

import android.content.Context;
import stub.Unknown;

public class View {
    public static final int GONE = Unknown.INT;
    public static final int VISIBLE = Unknown.INT;

    public View(Context a) {}

    public final boolean requestFocus() {
        throw Unknown.body();
    }

    public void setOnClickListener(View.OnClickListener a) {
        throw Unknown.body();
    }

    public void setOnFocusChangeListener(View.OnFocusChangeListener a) {
        throw Unknown.body();
    }

    public void setVisibility(int a) {
        throw Unknown.body();
    }

    public interface OnClickListener {
        void onClick(View a);
    }

    public interface OnFocusChangeListener {
        void onFocusChange(View a, boolean b);
    }
}
