package cleave.core.session;

/**
 * One connection to a server, as {@link Session} is. All methods but {@code run} return at once.
 */
public interface Visit {
    Counts counts();

    /** Serve until it ends. */
    Ending run() throws InterruptedException;

    /** Take nothing new, answer what is there; the server then says bye. */
    void drain();

    /** Say bye, and close. */
    void leave(String reason);

    /** Close without a word: nobody hears it. */
    void drop(String reason);
}
