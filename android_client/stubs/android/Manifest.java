package android;

import stub.Unknown;

public final class Manifest {
    Manifest() {}

    public static final class permission {
        public static final String POST_NOTIFICATIONS = Unknown.TEXT;

        permission() {}
    }
}
