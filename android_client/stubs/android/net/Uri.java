package android.net;

public abstract class Uri {
    Uri() {}

    public abstract String toString();
}
