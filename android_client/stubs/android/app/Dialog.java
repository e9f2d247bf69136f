package android.app;

public class Dialog {
    Dialog() {}
}
