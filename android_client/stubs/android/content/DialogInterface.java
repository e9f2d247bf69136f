package android.content;

import stub.Unknown;

public interface DialogInterface {
    int BUTTON_POSITIVE = Unknown.INT;

    public interface OnClickListener {
        void onClick(DialogInterface dialogInterface, int value);
    }
}
