package android.view;

import stub.Unknown;

public interface WindowManager {
    public static class LayoutParams extends ViewGroup.LayoutParams {
        public static final int FLAG_KEEP_SCREEN_ON = Unknown.INT;

        public LayoutParams() {
            super(0, 0);
        }
    }
}
