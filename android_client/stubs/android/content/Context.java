package android.content;

import android.content.pm.PackageManager;
import android.content.res.Resources;
import java.io.File;
import stub.Unknown;

public abstract class Context {
    public static final int BIND_AUTO_CREATE = Unknown.INT;
    public static final int MODE_PRIVATE = Unknown.INT;

    public Context() {}

    public abstract boolean bindService(
            Intent intent, ServiceConnection serviceConnection, int value);

    public abstract int checkSelfPermission(String text);

    public abstract Context getApplicationContext();

    public abstract ContentResolver getContentResolver();

    public abstract File getFilesDir();

    public abstract PackageManager getPackageManager();

    public abstract String getPackageName();

    public abstract Resources getResources();

    public abstract SharedPreferences getSharedPreferences(String text, int value);

    public final String getString(int resId) {
        throw Unknown.body();
    }

    public final String getString(int resId, Object... formatArgs) {
        throw Unknown.body();
    }

    public final <T> T getSystemService(Class<T> serviceClass) {
        throw Unknown.body();
    }

    public abstract Intent registerReceiver(
            BroadcastReceiver broadcastReceiver, IntentFilter intentFilter);

    public abstract void startActivity(Intent intent);

    public abstract ComponentName startForegroundService(Intent intent);

    public abstract ComponentName startService(Intent intent);

    public abstract void unbindService(ServiceConnection serviceConnection);

    public abstract void unregisterReceiver(BroadcastReceiver broadcastReceiver);
}
