package cleave.core;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertTrue;

import java.io.File;
import java.nio.file.Files;
import java.nio.file.attribute.PosixFilePermissions;
import org.junit.Rule;
import org.junit.Test;
import org.junit.rules.TemporaryFolder;

public class FileCredentialStoreTest {
    /** All but one digit of a fingerprint. */
    private static final String PIN =
            "sha256:000000000000000000000000000000000000000000000000000000000000000";

    @Rule public final TemporaryFolder folder = new TemporaryFolder();

    @Test
    public void aCredentialIsFoundByServerOrElseByAddress() throws Exception {
        FileCredentialStore store = new FileCredentialStore(new File(folder.getRoot(), "new"));
        JoinLink link = JoinLink.parse("ws://h:1/ws#c=code&s=S1");
        assertEquals("", store.find(link));
        store.keep("S1", link, "mine \u00e9=#");
        assertEquals("mine \u00e9=#", store.find(link));
        assertEquals("mine \u00e9=#", store.find(JoinLink.parse("wss://other/ws#s=S1")));
        assertEquals("mine \u00e9=#", store.find(JoinLink.parse("ws://h:1/ws#c=code")));
        assertEquals("", store.find(JoinLink.parse("ws://h:1/ws#s=S2")));
        assertEquals("", store.find(JoinLink.parse("ws://h:2/ws")));
    }

    @Test
    public void aNewOneReplacesAnOldOneAndCanBeRemoved() throws Exception {
        FileCredentialStore store = new FileCredentialStore(folder.getRoot());
        JoinLink link = JoinLink.parse("ws://h:1/ws#s=S1");
        store.keep("S1", link, "old");
        store.keep("S1", link, "new");
        assertEquals("new", store.find(link));
        assertEquals(1, store.kept().size());
        assertEquals("S1", store.kept().get(0).server);
        assertEquals("ws://h:1/ws", store.kept().get(0).address);
        store.remove(store.kept().get(0));
        assertEquals("", store.find(link));
    }

    @Test
    public void oneOfAProtectedConnectionGoesToNoOther() throws Exception {
        FileCredentialStore store = new FileCredentialStore(folder.getRoot());
        String pin = PIN + "0";
        store.keep("S1", JoinLink.parse("wss://h:1/ws#s=S1"), "verified");
        assertEquals("verified", store.find(JoinLink.parse("wss://other/ws#s=S1")));
        assertEquals("", store.find(JoinLink.parse("ws://h:1/ws#s=S1")));
        store.keep("S2", JoinLink.parse("wss://h:2/ws#s=S2&fp=" + pin), "pinned");
        assertEquals("pinned", store.find(JoinLink.parse("wss://other/ws#s=S2&fp=" + pin)));
        assertEquals("pinned", store.find(JoinLink.parse("wss://h:2/ws#fp=" + pin)));
        assertEquals("", store.find(JoinLink.parse("wss://h:2/ws#s=S2&fp=" + PIN + "1")));
        assertEquals("", store.find(JoinLink.parse("wss://h:2/ws#s=S2")));
        assertEquals("", store.find(JoinLink.parse("ws://h:2/ws#s=S2")));
    }

    @Test
    public void aServerThatNamesAnothersIdDoesNotReplaceItsCredential() throws Exception {
        FileCredentialStore store = new FileCredentialStore(folder.getRoot());
        JoinLink pinned = JoinLink.parse("wss://h:1/ws#s=S1&fp=" + PIN + "0");
        JoinLink moved = JoinLink.parse("wss://h:2/ws#s=S1&fp=" + PIN + "0");
        JoinLink otherPin = JoinLink.parse("wss://h:1/ws#s=S1&fp=" + PIN + "1");
        JoinLink plain = JoinLink.parse("ws://h:1/ws#s=S1");
        JoinLink otherPlain = JoinLink.parse("ws://h:2/ws#s=S1");
        store.keep("S1", pinned, "first");
        store.keep("S1", moved, "mine");
        assertEquals(1, store.kept().size());
        store.keep("S1", otherPin, "of another");
        store.keep("S1", plain, "in plain text");
        store.keep("S1", otherPlain, "elsewhere");
        assertEquals(4, store.kept().size());
        assertEquals("mine", store.find(moved));
        assertEquals("of another", store.find(otherPin));
        assertEquals("in plain text", store.find(plain));
        assertEquals("elsewhere", store.find(otherPlain));
    }

    @Test
    public void onlyItsOwnerReadsItAndRubbishIsNoCredential() throws Exception {
        FileCredentialStore store = new FileCredentialStore(folder.getRoot());
        JoinLink link = JoinLink.parse("ws://h:1/ws#s=S1");
        store.keep("S1", link, "mine");
        File[] files = folder.getRoot().listFiles();
        assertEquals(1, files.length);
        assertEquals(
                "rw-------",
                PosixFilePermissions.toString(Files.getPosixFilePermissions(files[0].toPath())));
        Files.write(files[0].toPath(), new byte[] {'\\', 'u', 'x', 0});
        assertEquals("", store.find(link));
        assertTrue(new FileCredentialStore(new File("/nonexistent")).kept().isEmpty());
    }
}
