package android.widget;

import android.content.Context;
import android.view.KeyEvent;
import android.view.View;
import stub.Unknown;

public class TextView extends View {
    public TextView(Context a) {
        super(null);
    }

    public CharSequence getText() {
        throw Unknown.body();
    }

    public void setError(CharSequence a) {
        throw Unknown.body();
    }

    public void setOnEditorActionListener(TextView.OnEditorActionListener a) {
        throw Unknown.body();
    }

    public final void setText(CharSequence a) {
        throw Unknown.body();
    }

    public final void setText(int a) {
        throw Unknown.body();
    }

    public interface OnEditorActionListener {
        boolean onEditorAction(TextView a, int b, KeyEvent c);
    }
}
