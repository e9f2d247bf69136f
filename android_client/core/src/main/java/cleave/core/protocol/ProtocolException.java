package cleave.core.protocol;

/** The peer sent what the protocol forbids: the session is to be ended. */
public class ProtocolException extends Exception {
    private static final long serialVersionUID = 1;

    public ProtocolException(String text) {
        super(text);
    }
}
