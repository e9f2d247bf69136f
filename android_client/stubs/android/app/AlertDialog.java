package android.app;

import android.content.Context;
import android.content.DialogInterface;
import stub.Unknown;

public class AlertDialog extends Dialog {
    AlertDialog() {}

    public static class Builder {
        public Builder(Context a) {}

        public AlertDialog.Builder setMessage(CharSequence a) {
            throw Unknown.body();
        }

        public AlertDialog.Builder setNegativeButton(int a, DialogInterface.OnClickListener b) {
            throw Unknown.body();
        }

        public AlertDialog.Builder setPositiveButton(int a, DialogInterface.OnClickListener b) {
            throw Unknown.body();
        }

        public AlertDialog.Builder setTitle(CharSequence a) {
            throw Unknown.body();
        }

        public AlertDialog show() {
            throw Unknown.body();
        }
    }
}
