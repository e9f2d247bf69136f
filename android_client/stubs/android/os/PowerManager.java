package android.os;

import stub.Unknown;

public final class PowerManager {
    public static final int PARTIAL_WAKE_LOCK = Unknown.INT;

    PowerManager() {}

    public int getCurrentThermalStatus() {
        throw Unknown.body();
    }

    public PowerManager.WakeLock newWakeLock(int levelAndFlags, String tag) {
        throw Unknown.body();
    }

    public static final class WakeLock {
        WakeLock() {}

        public void acquire() {
            throw Unknown.body();
        }

        public void acquire(long timeout) {
            throw Unknown.body();
        }

        public boolean isHeld() {
            throw Unknown.body();
        }

        public void release() {
            throw Unknown.body();
        }

        public void setReferenceCounted(boolean value) {
            throw Unknown.body();
        }
    }
}
