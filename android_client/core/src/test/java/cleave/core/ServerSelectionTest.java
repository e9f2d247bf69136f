package cleave.core;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertSame;

import java.util.Arrays;
import java.util.Collections;
import org.junit.Test;

public class ServerSelectionTest {
    private static final String OTHER = "ws://127.0.0.1:2/ws";
    private static final String PIN = "sha256:" + String.join("", Collections.nCopies(32, "ab"));

    private final JoinLink home = link("ws://127.0.0.1:1/ws#c=secret");
    private final ServerSelection place = new ServerSelection(home);

    private static JoinLink link(String text) {
        try {
            return JoinLink.parse(text);
        } catch (InvalidLinkException error) {
            throw new AssertionError(error);
        }
    }

    @Test
    public void itGoesWhereItIsSentAndStaysThere() {
        assertSame(home, place.due());
        place.ended(true, OTHER + "#c=");
        JoinLink other = place.due();
        assertEquals(OTHER, other.address);
        place.ended(true, ""); // the connection broke, and is made again
        assertSame(other, place.due());
    }

    @Test
    public void itIsSentOnFromWhereItIs() {
        place.ended(true, OTHER + "#c=");
        place.ended(true, "wss://127.0.0.1:3/ws#c=");
        assertEquals("wss://127.0.0.1:3/ws", place.due().address);
    }

    @Test
    public void itGoesHomeWhereItIsNotWelcomeOrNobodyIsThere() {
        place.ended(true, OTHER + "#c=");
        place.ended(false, "");
        assertSame(home, place.due());
    }

    @Test
    public void whatIsNoAddressMovesNobody() {
        for (String address :
                Arrays.asList("nonsense", "https://h:3/elsewhere", "ws://", "wss://h#fp=x")) {
            place.ended(true, address);
            assertSame(home, place.due());
        }
    }

    @Test
    public void nobodyIsMovedFromAnEncryptedConnectionToOneThatIsNot() {
        JoinLink secure = link("wss://127.0.0.1:1/ws#c=secret&fp=" + PIN);
        ServerSelection there = new ServerSelection(secure);
        there.ended(true, OTHER + "#c=");
        assertSame(secure, there.due());
    }

    @Test
    public void aPinnedCertificateIsThatOfTheOtherServer() {
        place.ended(true, "wss://127.0.0.1:2/ws#c=&fp=" + PIN);
        assertEquals(PIN, place.due().fingerprint);
    }
}
