package android.widget;

import android.content.Context;
import stub.Unknown;

public class SeekBar extends AbsSeekBar {
    public SeekBar(Context a) {
        super(null);
    }

    public void setOnSeekBarChangeListener(SeekBar.OnSeekBarChangeListener a) {
        throw Unknown.body();
    }

    public interface OnSeekBarChangeListener {
        void onProgressChanged(SeekBar a, int b, boolean c);

        void onStartTrackingTouch(SeekBar a);

        void onStopTrackingTouch(SeekBar a);
    }
}
