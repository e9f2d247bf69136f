package android.app;

import android.content.Context;
import android.content.DialogInterface;
import android.widget.Button;
import stub.Unknown;

public class AlertDialog extends Dialog {
    AlertDialog() {}

    public Button getButton(int whichButton) {
        throw Unknown.body();
    }

    public static class Builder {
        public Builder(Context context) {}

        public AlertDialog.Builder setMessage(CharSequence message) {
            throw Unknown.body();
        }

        public AlertDialog.Builder setNegativeButton(
                int textId, DialogInterface.OnClickListener listener) {
            throw Unknown.body();
        }

        public AlertDialog.Builder setPositiveButton(
                int textId, DialogInterface.OnClickListener listener) {
            throw Unknown.body();
        }

        public AlertDialog.Builder setTitle(CharSequence title) {
            throw Unknown.body();
        }

        public AlertDialog show() {
            throw Unknown.body();
        }
    }
}
