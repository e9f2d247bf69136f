package android.content;

public interface DialogInterface {
    public interface OnClickListener {
        void onClick(DialogInterface dialogInterface, int value);
    }
}
