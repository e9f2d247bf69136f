package android.widget;

import android.content.Context;
import android.view.View;
import stub.Unknown;

public class ProgressBar extends View {
    public ProgressBar(Context a) {
        super(null);
    }

    public void setMax(int a) {
        throw Unknown.body();
    }

    public void setProgress(int a) {
        throw Unknown.body();
    }
}
