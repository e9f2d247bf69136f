package android.widget;

import android.content.Context;
import stub.Unknown;

public abstract class CompoundButton extends Button {
    public CompoundButton(Context context) {
        super(null);
    }

    public void setChecked(boolean checked) {
        throw Unknown.body();
    }

    public void setOnCheckedChangeListener(CompoundButton.OnCheckedChangeListener listener) {
        throw Unknown.body();
    }

    public interface OnCheckedChangeListener {
        void onCheckedChanged(CompoundButton compoundButton, boolean on);
    }
}
