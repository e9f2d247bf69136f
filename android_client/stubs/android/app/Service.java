package android.app;

import android.content.ContextWrapper;
import android.content.Intent;
import android.os.IBinder;
import stub.Unknown;

public abstract class Service extends ContextWrapper {
    public static final int START_STICKY = Unknown.INT;
    public static final int STOP_FOREGROUND_REMOVE = Unknown.INT;

    public Service() {
        super(null);
    }

    public abstract IBinder onBind(Intent a);

    public void onCreate() {
        throw Unknown.body();
    }

    public void onDestroy() {
        throw Unknown.body();
    }

    public int onStartCommand(Intent a, int b, int c) {
        throw Unknown.body();
    }

    public final void startForeground(int a, Notification b) {
        throw Unknown.body();
    }

    public final void startForeground(int a, Notification b, int c) {
        throw Unknown.body();
    }

    public final void stopForeground(int a) {
        throw Unknown.body();
    }

    public final void stopSelf() {
        throw Unknown.body();
    }
}
