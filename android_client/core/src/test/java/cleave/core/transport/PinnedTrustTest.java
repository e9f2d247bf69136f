package cleave.core.transport;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertThrows;

import java.io.ByteArrayInputStream;
import java.nio.charset.StandardCharsets;
import java.security.cert.CertificateException;
import java.security.cert.CertificateFactory;
import java.security.cert.X509Certificate;
import org.junit.Before;
import org.junit.Test;

public class PinnedTrustTest {
    /** As a server makes it for itself; its time is over, which a fingerprint does not mind. */
    private static final String PEM =
            "-----BEGIN CERTIFICATE-----\n"
                    + "MIIBeTCCAR+gAwIBAgIUCNip4oTfTWqUgj+VGCwKWp2ETsswCgYIKoZIzj0EAwIw\n"
                    + "HTEbMBkGA1UEAwwSQ2xlYXZlIGV4YW1wbGUub3JnMB4XDTE5MTIzMTAwMDAwMFoX\n"
                    + "DTIyMDQwNTAwMDAwMFowHTEbMBkGA1UEAwwSQ2xlYXZlIGV4YW1wbGUub3JnMFkw\n"
                    + "EwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEr61K1qIU8PBD0Y/3LOm+Ifcpus0WIvq+\n"
                    + "+JGOR0APFOUSFkPtKEbMeZab37Td4NwBCkPV76AgK3ymof0jm11pU6M9MDswFgYD\n"
                    + "VR0RBA8wDYILZXhhbXBsZS5vcmcwDAYDVR0TAQH/BAIwADATBgNVHSUEDDAKBggr\n"
                    + "BgEFBQcDATAKBggqhkjOPQQDAgNIADBFAiAZfwfwWNfWTgeuAG/yUlwZcAb+UzDC\n"
                    + "x5cs6fIQQJpKrwIhANgISdaQAHyG9j7/dDxfAMY/8lVLjNIj6I8HzE5WypBU\n"
                    + "-----END CERTIFICATE-----\n";

    /** As the server's own code computes it. */
    private static final String FINGERPRINT =
            "sha256:16c7925de79d2967592fd618159743168817706ca317acdfd2a15299a9c7fd0d";

    private X509Certificate[] chain;

    @Before
    public void readCertificate() throws Exception {
        byte[] bytes = PEM.getBytes(StandardCharsets.US_ASCII);
        ByteArrayInputStream pem = new ByteArrayInputStream(bytes);
        chain =
                new X509Certificate[] {
                    (X509Certificate)
                            CertificateFactory.getInstance("X.509").generateCertificate(pem)
                };
    }

    @Test
    public void theFingerprintIsTheServersOwn() throws Exception {
        assertEquals(FINGERPRINT, PinnedTrust.fingerprintOf(chain[0]));
        new PinnedTrust(FINGERPRINT).checkServerTrusted(chain, "ECDHE_ECDSA");
    }

    @Test
    public void anyOtherIsRefusedAndShown() {
        PinnedTrust trust = new PinnedTrust(FINGERPRINT.replace("16c7", "16c8"));
        WrongCertificateException error =
                assertThrows(
                        WrongCertificateException.class,
                        () -> trust.checkServerTrusted(chain, "ECDHE_ECDSA"));
        assertEquals(FINGERPRINT, error.shown);
        X509Certificate[] none = {};
        assertThrows(CertificateException.class, () -> trust.checkServerTrusted(none, "RSA"));
        assertThrows(CertificateException.class, () -> trust.checkClientTrusted(chain, "RSA"));
    }
}
