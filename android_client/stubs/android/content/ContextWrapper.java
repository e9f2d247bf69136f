package android.content;

import android.content.pm.PackageManager;
import android.content.res.Resources;
import java.io.File;
import stub.Unknown;

public class ContextWrapper extends Context {
    public ContextWrapper(Context base) {}

    public boolean bindService(Intent service, ServiceConnection conn, int flags) {
        throw Unknown.body();
    }

    public int checkSelfPermission(String permission) {
        throw Unknown.body();
    }

    public Context getApplicationContext() {
        throw Unknown.body();
    }

    public ContentResolver getContentResolver() {
        throw Unknown.body();
    }

    public File getFilesDir() {
        throw Unknown.body();
    }

    public PackageManager getPackageManager() {
        throw Unknown.body();
    }

    public String getPackageName() {
        throw Unknown.body();
    }

    public Resources getResources() {
        throw Unknown.body();
    }

    public SharedPreferences getSharedPreferences(String name, int mode) {
        throw Unknown.body();
    }

    public Intent registerReceiver(BroadcastReceiver receiver, IntentFilter filter) {
        throw Unknown.body();
    }

    public void startActivity(Intent intent) {
        throw Unknown.body();
    }

    public ComponentName startForegroundService(Intent service) {
        throw Unknown.body();
    }

    public ComponentName startService(Intent service) {
        throw Unknown.body();
    }

    public void unbindService(ServiceConnection conn) {
        throw Unknown.body();
    }

    public void unregisterReceiver(BroadcastReceiver receiver) {
        throw Unknown.body();
    }
}
