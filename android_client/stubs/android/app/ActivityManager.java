package android.app;

import stub.Unknown;

public class ActivityManager {
    ActivityManager() {}

    public void getMemoryInfo(ActivityManager.MemoryInfo a) {
        throw Unknown.body();
    }

    public static class MemoryInfo {
        public long totalMem;

        public MemoryInfo() {}
    }
}
