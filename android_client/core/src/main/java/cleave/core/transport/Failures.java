package cleave.core.transport;

import cleave.core.session.Ending;
import java.io.EOFException;
import java.net.ConnectException;
import java.net.SocketTimeoutException;
import java.net.UnknownHostException;
import java.security.cert.CertificateException;
import javax.net.ssl.SSLException;
import javax.net.ssl.SSLPeerUnverifiedException;

/** Why a server was not reached, or a connection broke, for people. */
final class Failures {
    private static final int TOO_MANY_REQUESTS = 429;
    private static final int SERVER_ERRORS = 500;

    private final String address;
    private final String fingerprint;

    Failures(String address, String fingerprint) {
        this.address = address;
        this.fingerprint = fingerprint;
    }

    /**
     * What became of a connection.
     *
     * @param status of the HTTP response that was no WebSocket's; 0 where there was none
     * @param opened whether it had begun
     */
    Ending ending(Throwable error, int status, boolean opened) {
        WrongCertificateException wrong = cause(error, WrongCertificateException.class);
        if (wrong != null) {
            return Ending.stranger(
                    address + " presents a different certificate (" + wrong.shown + ") from the one "
                            + "in the join link (" + fingerprint + "); if the server made a new "
                            + "one, use the link that it shows now; otherwise, the connection may "
                            + "be intercepted");
        }
        if (cause(error, CertificateException.class) != null
                || error instanceof SSLPeerUnverifiedException) {
            return Ending.stranger(
                    "the certificate of " + address + " is not trusted; use the whole join link "
                            + "that the server shows, with its &fp=...");
        }
        if (cause(error, Meter.ExceededException.class) != null) {
            return Ending.lost(error.getMessage());
        }
        if (opened) {
            return Ending.lost("the connection broke (" + reason(error) + ")");
        }
        if (error instanceof SSLException) {
            return Ending.lost(
                    address + " does not answer in TLS (" + reason(error) + "); is it wss://, or "
                            + "ws://?");
        }
        if (status != 0) {
            String text =
                    address + " does not let this device in, or is no Cleave server (HTTP " + status
                            + ")";
            boolean passes = status == TOO_MANY_REQUESTS || status >= SERVER_ERRORS;
            return passes ? Ending.lost(text) : Ending.stranger(text);
        }
        String orSecure = address.startsWith("ws:") ? "; a server with TLS has wss://" : "";
        return Ending.lost(
                "no server answers at " + address + " (" + reason(error) + "); check that it runs, "
                        + "and its address and port" + orSecure);
    }

    /** In our words, where the library's are for programmers. */
    private static String reason(Throwable error) {
        if (error instanceof UnknownHostException) {
            return "no such host";
        }
        if (error instanceof SocketTimeoutException) {
            return "it says nothing";
        }
        if (error instanceof ConnectException) {
            return "refused, or no way to it";
        }
        String text = error.getMessage();
        boolean ended = text != null && text.startsWith("unexpected end of stream");
        if (error instanceof EOFException || ended) {
            return "it closed the connection";
        }
        return text == null ? error.getClass().getSimpleName() : text;
    }

    private static <T> T cause(Throwable error, Class<T> kind) {
        for (Throwable cause = error; cause != null; cause = cause.getCause()) {
            if (kind.isInstance(cause)) {
                return kind.cast(cause);
            }
        }
        return null;
    }
}
