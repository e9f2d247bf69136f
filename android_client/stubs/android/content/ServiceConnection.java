package android.content;

import android.os.IBinder;

public interface ServiceConnection {
    void onServiceConnected(ComponentName a, IBinder b);

    void onServiceDisconnected(ComponentName a);
}
