package android.content.pm;

import stub.Unknown;

public class ServiceInfo {
    public static final int FOREGROUND_SERVICE_TYPE_DATA_SYNC = Unknown.INT;

    ServiceInfo() {}
}
