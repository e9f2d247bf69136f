package android.net;

import stub.Unknown;

public class ConnectivityManager {
    ConnectivityManager() {}

    public Network getActiveNetwork() {
        throw Unknown.body();
    }

    public NetworkCapabilities getNetworkCapabilities(Network network) {
        throw Unknown.body();
    }

    public void registerDefaultNetworkCallback(
            ConnectivityManager.NetworkCallback networkCallback) {
        throw Unknown.body();
    }

    public void unregisterNetworkCallback(ConnectivityManager.NetworkCallback networkCallback) {
        throw Unknown.body();
    }

    public static class NetworkCallback {
        public NetworkCallback() {}

        public void onAvailable(Network network) {
            throw Unknown.body();
        }

        public void onLost(Network network) {
            throw Unknown.body();
        }
    }
}
