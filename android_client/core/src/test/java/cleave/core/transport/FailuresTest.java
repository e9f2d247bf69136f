package cleave.core.transport;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertSame;
import static org.junit.Assert.assertTrue;

import cleave.core.session.End;
import cleave.core.session.Ending;
import java.io.EOFException;
import java.io.IOException;
import java.net.ConnectException;
import java.net.UnknownHostException;
import java.security.cert.CertificateException;
import javax.net.ssl.SSLException;
import javax.net.ssl.SSLHandshakeException;
import org.junit.Test;

public class FailuresTest {
    private final Failures failures = new Failures("wss://h:1/ws", "sha256:aa");

    @Test
    public void whatMayPassIsTriedAgain() {
        for (IOException error :
                new IOException[] {
                    new ConnectException("x"),
                    new UnknownHostException("h"),
                    new SSLException("not TLS"),
                    new EOFException(),
                }) {
            Ending ending = failures.ending(error, 0, false);
            assertSame(End.LOST, ending.end);
            assertTrue(ending.text.contains("wss://h:1/ws"));
        }
        assertTrue(failures.ending(new IOException("x"), 403, false).text.contains("HTTP 403"));
        assertEquals(
                "the connection broke (it closed the connection)",
                failures.ending(new EOFException(), 101, true).text);
    }

    @Test
    public void aServerThatIsNotThereNowIsTriedAgainAndAnotherOneIsAStranger() {
        IOException error = new IOException("x");
        for (int status : new int[] {429, 500, 503}) {
            assertSame(End.LOST, failures.ending(error, status, false).end);
        }
        for (int status : new int[] {200, 301, 403, 404}) {
            assertSame(End.STRANGER, failures.ending(error, status, false).end);
        }
    }

    @Test
    public void anotherServerIsAStrangerWhateverWrapsThat() {
        SSLHandshakeException wrong = new SSLHandshakeException("x");
        wrong.initCause(new WrongCertificateException("sha256:bb"));
        Ending ending = failures.ending(wrong, 0, false);
        assertSame(End.STRANGER, ending.end);
        assertTrue(ending.text.contains("sha256:bb"));
        assertTrue(ending.text.contains("sha256:aa"));
        SSLHandshakeException untrusted = new SSLHandshakeException("x");
        untrusted.initCause(new CertificateException("no path"));
        assertSame(End.STRANGER, failures.ending(untrusted, 0, false).end);
    }
}
