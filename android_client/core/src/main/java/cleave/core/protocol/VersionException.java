package cleave.core.protocol;

/** The peer speaks another version of the protocol. */
public final class VersionException extends ProtocolException {
    private static final long serialVersionUID = 1;

    VersionException(String message) {
        super(message);
    }
}
