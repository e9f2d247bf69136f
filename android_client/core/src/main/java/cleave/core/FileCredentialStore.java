package cleave.core;

import java.io.File;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.Comparator;
import java.util.List;
import java.util.Properties;
import java.util.UUID;

/** Credentials in a folder, one in a file, which only its owner can read. */
public final class FileCredentialStore implements CredentialStore {
    private static final String ENDING = ".credential";

    private final File folder;

    /** A kept credential, for a list of servers; the secret itself is not in it. */
    public static final class Kept {
        public final String server;

        /** Where the server was. */
        public final String address;

        private final String fingerprint;
        private final File file;

        private Kept(String server, String address, String fingerprint, File file) {
            this.server = server;
            this.address = address;
            this.fingerprint = fingerprint;
            this.file = file;
        }

        /** Any server may say that it is this one: it is if it has its certificate or address. */
        private boolean isReplacedBy(String other, JoinLink link) {
            return server.equals(other)
                    && fingerprint.equals(link.fingerprint)
                    && (!fingerprint.isEmpty() || address.equals(link.address));
        }
    }

    /** @param folder made if it is not there; of the owner's own */
    public FileCredentialStore(File folder) {
        this.folder = folder;
    }

    @Override
    public String find(JoinLink link) {
        String found = "";
        for (File file : files()) {
            Properties values = read(file);
            boolean sameAddress = link.address.equals(values.getProperty("address"));
            boolean same =
                    link.server.isEmpty()
                            ? sameAddress
                            : link.server.equals(values.getProperty("server"));
            if (!same || !mayHave(link, values)) {
                continue;
            }
            if (sameAddress) {
                return values.getProperty("credential", "");
            }
            if (found.isEmpty()) {
                found = values.getProperty("credential", "");
            }
        }
        return found;
    }

    /**
     * Whoever writes a link may name any server's id in it: a credential goes only where the
     * connection is protected as it was when the server gave it.
     */
    private static boolean mayHave(JoinLink link, Properties values) {
        boolean wasSecure = values.getProperty("address", "").startsWith("wss:");
        String pinned = values.getProperty("fingerprint", "");
        return (link.isSecure || !wasSecure)
                && (pinned.isEmpty() || pinned.equals(link.fingerprint));
    }

    @Override
    public void keep(String server, JoinLink link, String credential) throws IOException {
        if (!folder.isDirectory() && !folder.mkdirs()) {
            throw new IOException("the folder " + folder + " cannot be made");
        }
        Properties values = new Properties();
        values.setProperty("server", server);
        values.setProperty("address", link.address);
        values.setProperty("fingerprint", link.fingerprint);
        values.setProperty("credential", credential);
        // Written elsewhere first: half a file is no credential. A name says nothing of the server.
        File fresh = new File(folder, UUID.randomUUID() + ".new");
        try {
            own(fresh);
            try (OutputStream out = new FileOutputStream(fresh)) {
                values.store(out, null);
            }
            List<Kept> earlier = kept();
            if (!fresh.renameTo(new File(folder, UUID.randomUUID() + ENDING))) {
                throw new IOException("a file cannot be made in " + folder);
            }
            for (Kept old : earlier) {
                if (old.isReplacedBy(server, link)) {
                    remove(old);
                }
            }
        } finally {
            fresh.delete(); // nothing is there if all went well
        }
    }

    /** What is kept. */
    public List<Kept> kept() {
        List<Kept> found = new ArrayList<>();
        for (File file : files()) {
            Properties values = read(file);
            found.add(
                    new Kept(
                            values.getProperty("server", ""),
                            values.getProperty("address", ""),
                            values.getProperty("fingerprint", ""),
                            file));
        }
        return found;
    }

    /**
     * Forget a credential: the device then needs a new code.
     *
     * @throws IOException when it cannot be removed
     */
    public void remove(Kept credential) throws IOException {
        if (!credential.file.delete() && credential.file.exists()) {
            throw new IOException(credential.file + " cannot be removed");
        }
    }

    /** An empty file that only its owner reads, before anything secret is in it. */
    private static void own(File file) throws IOException {
        boolean made =
                file.createNewFile()
                        && file.setReadable(false, false)
                        && file.setWritable(false, false)
                        && file.setReadable(true, true)
                        && file.setWritable(true, true);
        if (!made) {
            throw new IOException(file + " cannot be hidden from others");
        }
    }

    private List<File> files() {
        File[] files = folder.listFiles((where, name) -> name.endsWith(ENDING));
        if (files == null) {
            return Collections.emptyList();
        }
        // The latest first; the names say nothing.
        Arrays.sort(
                files, Comparator.comparingLong(File::lastModified).reversed().thenComparing(
                        Comparator.naturalOrder()));
        return Arrays.asList(files);
    }

    /** A file that cannot be read is no credential: the server says what is missing. */
    private static Properties read(File file) {
        Properties values = new Properties();
        try (InputStream in = new FileInputStream(file)) {
            values.load(in);
        } catch (IOException | IllegalArgumentException error) {
            return new Properties();
        }
        return values;
    }
}
