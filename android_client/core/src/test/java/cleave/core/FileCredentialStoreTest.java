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
