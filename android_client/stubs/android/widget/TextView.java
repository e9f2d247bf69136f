package android.widget;

import android.content.Context;
import android.view.KeyEvent;
import android.view.View;
import stub.Unknown;

public class TextView extends View {
    public TextView(Context context) {
        super(null);
    }

    public CharSequence getText() {
        throw Unknown.body();
    }

    public void setError(CharSequence error) {
        throw Unknown.body();
    }

    public void setOnEditorActionListener(TextView.OnEditorActionListener l) {
        throw Unknown.body();
    }

    public final void setText(CharSequence text) {
        throw Unknown.body();
    }

    public final void setText(int resid) {
        throw Unknown.body();
    }

    public interface OnEditorActionListener {
        boolean onEditorAction(TextView textView, int value, KeyEvent keyEvent);
    }
}
