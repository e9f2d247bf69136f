package cleave.core.transport;

import java.net.Socket;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.security.cert.CertificateException;
import java.security.cert.X509Certificate;
import javax.net.ssl.SSLEngine;
import javax.net.ssl.X509ExtendedTrustManager;

/**
 * Trusts the one certificate whose fingerprint is known, whoever signed it, whatever its names and
 * dates are. A handshake with any other fails before a byte is sent.
 */
final class PinnedTrust extends X509ExtendedTrustManager {
    private static final String HEX = "0123456789abcdef";

    private final String fingerprint;

    /** @param fingerprint {@code sha256:} and 64 hexadecimal digits in lower case */
    PinnedTrust(String fingerprint) {
        this.fingerprint = fingerprint;
    }

    /** The fingerprint of a certificate, as join URLs name it. */
    static String fingerprintOf(X509Certificate certificate) throws CertificateException {
        byte[] digest;
        try {
            digest = MessageDigest.getInstance("SHA-256").digest(certificate.getEncoded());
        } catch (NoSuchAlgorithmException error) {
            throw new CertificateException("this system lacks SHA-256", error);
        }
        StringBuilder text = new StringBuilder("sha256:");
        for (byte b : digest) {
            text.append(HEX.charAt((b >> 4) & 15)).append(HEX.charAt(b & 15));
        }
        return text.toString();
    }

    @Override
    public void checkServerTrusted(X509Certificate[] chain, String kind)
            throws CertificateException {
        if (chain == null || chain.length == 0) {
            throw new CertificateException("the server shows no certificate");
        }
        String shown = fingerprintOf(chain[0]);
        boolean same =
                MessageDigest.isEqual(
                        shown.getBytes(StandardCharsets.US_ASCII),
                        fingerprint.getBytes(StandardCharsets.US_ASCII));
        if (!same) {
            throw new WrongCertificateException(shown);
        }
    }

    @Override
    public void checkServerTrusted(X509Certificate[] chain, String kind, Socket socket)
            throws CertificateException {
        checkServerTrusted(chain, kind);
    }

    @Override
    public void checkServerTrusted(X509Certificate[] chain, String kind, SSLEngine engine)
            throws CertificateException {
        checkServerTrusted(chain, kind);
    }

    @Override
    public void checkClientTrusted(X509Certificate[] chain, String kind)
            throws CertificateException {
        throw new CertificateException("no client is trusted here");
    }

    @Override
    public void checkClientTrusted(X509Certificate[] chain, String kind, Socket socket)
            throws CertificateException {
        checkClientTrusted(chain, kind);
    }

    @Override
    public void checkClientTrusted(X509Certificate[] chain, String kind, SSLEngine engine)
            throws CertificateException {
        checkClientTrusted(chain, kind);
    }

    @Override
    public X509Certificate[] getAcceptedIssuers() {
        return new X509Certificate[0];
    }
}
