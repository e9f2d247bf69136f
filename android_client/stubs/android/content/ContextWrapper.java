package android.content;

import android.content.pm.PackageManager;
import android.content.res.Resources;
import java.io.File;
import stub.Unknown;

public class ContextWrapper extends Context {
    public ContextWrapper(Context a) {}

    public boolean bindService(Intent a, ServiceConnection b, int c) {
        throw Unknown.body();
    }

    public int checkSelfPermission(String a) {
        throw Unknown.body();
    }

    public Context getApplicationContext() {
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

    public SharedPreferences getSharedPreferences(String a, int b) {
        throw Unknown.body();
    }

    public Intent registerReceiver(BroadcastReceiver a, IntentFilter b) {
        throw Unknown.body();
    }

    public void startActivity(Intent a) {
        throw Unknown.body();
    }

    public ComponentName startForegroundService(Intent a) {
        throw Unknown.body();
    }

    public ComponentName startService(Intent a) {
        throw Unknown.body();
    }

    public void unbindService(ServiceConnection a) {
        throw Unknown.body();
    }

    public void unregisterReceiver(BroadcastReceiver a) {
        throw Unknown.body();
    }
}
