package android.net;

import stub.Unknown;

public final class NetworkCapabilities {
    public static final int NET_CAPABILITY_NOT_METERED = Unknown.INT;
    public static final int TRANSPORT_ETHERNET = Unknown.INT;
    public static final int TRANSPORT_WIFI = Unknown.INT;

    NetworkCapabilities() {}

    public boolean hasCapability(int capability) {
        throw Unknown.body();
    }

    public boolean hasTransport(int transportType) {
        throw Unknown.body();
    }
}
