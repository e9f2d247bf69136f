package cleave.core.transport;

import java.security.cert.CertificateException;

/** The server showed another certificate than the one that was asked for. */
public final class WrongCertificateException extends CertificateException {
    private static final long serialVersionUID = 1;

    /** The fingerprint of what it showed. */
    public final String shown;

    WrongCertificateException(String shown) {
        super("another certificate: " + shown);
        this.shown = shown;
    }
}
