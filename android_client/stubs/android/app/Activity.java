package android.app;

import android.content.Intent;
import android.os.Bundle;
import android.view.ContextThemeWrapper;
import android.view.View;
import android.view.Window;
import stub.Unknown;

public class Activity extends ContextThemeWrapper {
    public static final int RESULT_OK = Unknown.INT;

    public Activity() {}

    public <T extends View> T findViewById(int id) {
        throw Unknown.body();
    }

    public Intent getIntent() {
        throw Unknown.body();
    }

    public Window getWindow() {
        throw Unknown.body();
    }

    protected void onActivityResult(int requestCode, int resultCode, Intent data) {
        throw Unknown.body();
    }

    protected void onCreate(Bundle savedInstanceState) {
        throw Unknown.body();
    }

    protected void onDestroy() {
        throw Unknown.body();
    }

    protected void onNewIntent(Intent intent) {
        throw Unknown.body();
    }

    protected void onStart() {
        throw Unknown.body();
    }

    protected void onStop() {
        throw Unknown.body();
    }

    public final void requestPermissions(String[] permissions, int requestCode) {
        throw Unknown.body();
    }

    public final void runOnUiThread(Runnable action) {
        throw Unknown.body();
    }

    public void setContentView(int layoutResID) {
        throw Unknown.body();
    }

    public void startActivityForResult(Intent intent, int requestCode) {
        throw Unknown.body();
    }
}
