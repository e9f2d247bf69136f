package android.content.pm;

import stub.Unknown;

public abstract class PackageManager {
    public static final int PERMISSION_GRANTED = Unknown.INT;

    PackageManager() {}

    public abstract PackageInfo getPackageInfo(String text, int value)
            throws NameNotFoundException;

    public static class NameNotFoundException extends Exception {
        private static final long serialVersionUID = 1;

        public NameNotFoundException() {}
    }
}
