package stub;

/**
 * What a stub's constants are set to. These are no constants to the compiler, which so leaves
 * Android's own values to be taken when the app runs, rather than copying the stub's into it.
 */
public final class Unknown {
    public static final int INT = Integer.parseInt("0");
    public static final String TEXT = String.valueOf("unknown");

    private Unknown() {}

    /** The error of every body: a stub is compiled against, never run. */
    public static UnsupportedOperationException body() {
        return new UnsupportedOperationException("this is a stub of an Android class");
    }
}
