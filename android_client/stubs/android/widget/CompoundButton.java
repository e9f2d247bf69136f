package android.widget;

import android.content.Context;
import stub.Unknown;

public abstract class CompoundButton extends Button {
    public CompoundButton(Context a) {
        super(null);
    }

    public void setChecked(boolean a) {
        throw Unknown.body();
    }

    public void setOnCheckedChangeListener(CompoundButton.OnCheckedChangeListener a) {
        throw Unknown.body();
    }

    public interface OnCheckedChangeListener {
        void onCheckedChanged(CompoundButton a, boolean b);
    }
}
