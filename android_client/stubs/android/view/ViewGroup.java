package android.view;

import android.content.Context;

public abstract class ViewGroup extends View {
    public ViewGroup(Context context) {
        super(null);
    }

    public static class LayoutParams {
        public LayoutParams(int width, int height) {}
    }
}
