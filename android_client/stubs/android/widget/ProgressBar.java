package android.widget;

import android.content.Context;
import android.view.View;
import stub.Unknown;

public class ProgressBar extends View {
    public ProgressBar(Context context) {
        super(null);
    }

    public void setMax(int max) {
        throw Unknown.body();
    }

    public void setProgress(int progress) {
        throw Unknown.body();
    }
}
