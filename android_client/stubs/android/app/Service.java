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

    public abstract IBinder onBind(Intent intent);

    public void onCreate() {
        throw Unknown.body();
    }

    public void onDestroy() {
        throw Unknown.body();
    }

    public int onStartCommand(Intent intent, int flags, int startId) {
        throw Unknown.body();
    }

    public final void startForeground(int id, Notification notification) {
        throw Unknown.body();
    }

    public final void startForeground(
            int id, Notification notification, int foregroundServiceType) {
        throw Unknown.body();
    }

    public final void stopForeground(int notificationBehavior) {
        throw Unknown.body();
    }

    public final void stopSelf(int startId) {
        throw Unknown.body();
    }
}
