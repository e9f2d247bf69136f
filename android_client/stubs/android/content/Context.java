package android.content;

import android.content.pm.PackageManager;
import android.content.res.Resources;
import java.io.File;
import stub.Unknown;

public abstract class Context {
    public static final int BIND_AUTO_CREATE = Unknown.INT;
    public static final int MODE_PRIVATE = Unknown.INT;

    public Context() {}

    public abstract boolean bindService(Intent a, ServiceConnection b, int c);

    public abstract int checkSelfPermission(String a);

    public abstract Context getApplicationContext();

    public abstract File getFilesDir();

    public abstract PackageManager getPackageManager();

    public abstract String getPackageName();

    public abstract Resources getResources();

    public abstract SharedPreferences getSharedPreferences(String a, int b);

    public final String getString(int a) {
        throw Unknown.body();
    }

    public final String getString(int a, Object... b) {
        throw Unknown.body();
    }

    public final <T> T getSystemService(Class<T> a) {
        throw Unknown.body();
    }

    public abstract Intent registerReceiver(BroadcastReceiver a, IntentFilter b);

    public abstract void startActivity(Intent a);

    public abstract ComponentName startForegroundService(Intent a);

    public abstract ComponentName startService(Intent a);

    public abstract void unbindService(ServiceConnection a);

    public abstract void unregisterReceiver(BroadcastReceiver a);
}
