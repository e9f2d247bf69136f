package android.app;

import stub.Unknown;

public class ActivityManager {
    ActivityManager() {}

    public void getMemoryInfo(ActivityManager.MemoryInfo outInfo) {
        throw Unknown.body();
    }

    public static class MemoryInfo {
        public long totalMem;

        public MemoryInfo() {}
    }
}
