package android.view;

import android.content.Context;

public abstract class ViewGroup extends View {
    public ViewGroup(Context a) {
        super(null);
    }

    public static class LayoutParams {
        public LayoutParams(int a, int b) {}
    }
}
