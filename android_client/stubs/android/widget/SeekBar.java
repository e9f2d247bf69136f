package android.widget;

import android.content.Context;
import stub.Unknown;

public class SeekBar extends AbsSeekBar {
    public SeekBar(Context context) {
        super(null);
    }

    public void setOnSeekBarChangeListener(SeekBar.OnSeekBarChangeListener l) {
        throw Unknown.body();
    }

    public interface OnSeekBarChangeListener {
        void onProgressChanged(SeekBar bar, int value, boolean on);

        void onStartTrackingTouch(SeekBar bar);

        void onStopTrackingTouch(SeekBar bar);
    }
}
