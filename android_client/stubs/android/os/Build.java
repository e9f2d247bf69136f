package android.os;

import stub.Unknown;

public class Build {
    public static final String HARDWARE = Unknown.TEXT;
    public static final String MANUFACTURER = Unknown.TEXT;
    public static final String MODEL = Unknown.TEXT;
    public static final String SOC_MANUFACTURER = Unknown.TEXT;
    public static final String SOC_MODEL = Unknown.TEXT;

    Build() {}

    public static class VERSION {
        public static final String RELEASE = Unknown.TEXT;
        public static final int SDK_INT = Unknown.INT;

        VERSION() {}
    }
}
