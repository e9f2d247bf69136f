package cleave.core;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertFalse;
import static org.junit.Assert.assertThrows;
import static org.junit.Assert.assertTrue;

import java.util.Arrays;
import java.util.Collections;
import java.util.Locale;
import org.junit.Test;

public class JoinLinkTest {
    private static final String HEX = String.join("", Collections.nCopies(32, "aB"));

    @Test
    public void bothFormsMeanTheSame() throws Exception {
        String fragment = "#c=RNWX-CXTX&s=KBG%20AH&fp=sha256:" + HEX + "&new=1";
        JoinLink page = JoinLink.parse("https://example.org:8765/join" + fragment);
        JoinLink socket = JoinLink.parse(" wss://example.org:8765/ws" + fragment + "\n");
        for (JoinLink link : Arrays.asList(page, socket)) {
            assertEquals("wss://example.org:8765/ws", link.address);
            assertEquals("example.org", link.host);
            assertEquals("RNWX-CXTX", link.credential);
            assertEquals("KBG AH", link.server);
            assertEquals("sha256:" + HEX.toLowerCase(Locale.ROOT), link.fingerprint);
            assertTrue(link.isSecure);
            assertEquals("https://example.org:8765", link.origin());
        }
    }

    @Test
    public void theFragmentMayBeMissingAndThePathEmpty() throws Exception {
        JoinLink link = JoinLink.parse("ws://192.168.1.20:8765");
        assertEquals("ws://192.168.1.20:8765/ws", link.address);
        assertEquals("ws://h:1/ws", JoinLink.parse("ws://h:1/#c=a").address);
        assertEquals("", link.credential);
        assertEquals("", link.fingerprint);
        assertFalse(link.isSecure);
        assertEquals("ws://h:1/deep/ws", JoinLink.parse("http://h:1/deep/join").address);
        assertEquals("ws://[::1]:8765/ws", JoinLink.parse("ws://[::1]:8765/ws#c=a").address);
        assertEquals("wss://h/ws", JoinLink.parse("wss://h:443/ws").address);
    }

    @Test
    public void credentialsAreDecodedAndAPlusIsAPlus() throws Exception {
        assertEquals("a+b é%", JoinLink.parse("ws://h/ws#c=a+b%20%C3%A9%").credential);
        assertEquals("ab=", JoinLink.parse("ws://h/ws#c=ab=").credential);
        assertEquals("%zz", JoinLink.parse("ws://h/ws#c=%zz").credential);
    }

    @Test
    public void aLinkThatOpensTheAppHoldsAnother() throws Exception {
        String inner = "https%3A%2F%2Fh%3A1%2Fjoin%23c%3DA%2526B%26fp%3Dsha256%3A" + HEX;
        for (String form : Arrays.asList("cleave://join?url=", "cleave://join/?url=")) {
            JoinLink link = JoinLink.parse(form + inner);
            assertEquals("wss://h:1/ws", link.address);
            assertEquals("A&B", link.credential);
            assertTrue(link.fingerprint.startsWith("sha256:abab"));
        }
        assertThrows(InvalidLinkException.class, () -> JoinLink.parse("cleave://join?x=1"));
    }

    @Test
    public void whatIsNoLinkIsRefusedWithoutItsSecret() {
        for (String text :
                Arrays.asList(
                        "",
                        "hello",
                        "ftp://h/join#c=secret",
                        "http://h/#c=secret",
                        "ws://#c=secret",
                        "ws://h:0/ws#c=secret",
                        "ws://h:99999/ws#c=secret",
                        "wss://h/ws#c=secret&fp=sha256:1234",
                        "wss://h/ws#c=secret&fp=md5:" + HEX,
                        "ws://h/ws#c=secret&fp=sha256:" + HEX)) {
            Exception error =
                    assertThrows(text, InvalidLinkException.class, () -> JoinLink.parse(text));
            assertFalse(error.getMessage().contains("secret"));
        }
    }

    @Test
    public void whatIsKeptToComeBackHoldsNoCode() throws Exception {
        JoinLink link = JoinLink.parse("wss://h:1/ws#c=secret&s=a%26b&fp=sha256:" + HEX);
        JoinLink kept = JoinLink.parse(link.withoutCredential());
        assertEquals(link.address, kept.address);
        assertEquals("a&b", kept.server);
        assertEquals(link.fingerprint, kept.fingerprint);
        assertEquals("", kept.credential);
    }
}
