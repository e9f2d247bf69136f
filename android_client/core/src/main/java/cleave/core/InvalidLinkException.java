package cleave.core;

/** A text is no join link; the message says why and what to do, and holds no secret. */
public class InvalidLinkException extends Exception {
    private static final long serialVersionUID = 1;

    InvalidLinkException(String text) {
        super(text);
    }
}
