package android.net;

import stub.Unknown;

public class ConnectivityManager {
    ConnectivityManager() {}

    public Network getActiveNetwork() {
        throw Unknown.body();
    }

    public NetworkCapabilities getNetworkCapabilities(Network a) {
        throw Unknown.body();
    }

    public void registerDefaultNetworkCallback(ConnectivityManager.NetworkCallback a) {
        throw Unknown.body();
    }

    public void unregisterNetworkCallback(ConnectivityManager.NetworkCallback a) {
        throw Unknown.body();
    }

    public static class NetworkCallback {
        public NetworkCallback() {}

        public void onAvailable(Network a) {
            throw Unknown.body();
        }

        public void onLost(Network a) {
            throw Unknown.body();
        }
    }
}
