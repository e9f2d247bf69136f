package cleave.app;

import android.content.Context;
import android.content.SharedPreferences;
import cleave.core.CredentialStore;
import cleave.core.InvalidLinkException;
import cleave.core.JoinLink;
import java.io.IOException;
import java.util.Map;

/**
 * The servers that this phone may come back to, and its credentials for them, in the app's private
 * storage; nothing of it is backed up.
 */
final class Servers implements CredentialStore {
    private static final String LAST = "last";
    private static final String BY_SERVER = "server ";
    private static final String BY_ADDRESS = "address ";

    private final SharedPreferences kept;

    Servers(Context context) {
        kept = context.getSharedPreferences("servers", Context.MODE_PRIVATE);
    }

    /** Where the phone was last, without anything secret; null where it was nowhere. */
    JoinLink last() {
        String text = kept.getString(LAST, "");
        if (text.isEmpty()) {
            return null;
        }
        try {
            return JoinLink.parse(text);
        } catch (InvalidLinkException error) {
            throw new IllegalStateException("a link that was kept is none", error);
        }
    }

    /** Whether there is anything to forget. */
    boolean any() {
        return !kept.getAll().isEmpty();
    }

    /** Forget all of it. */
    void clear() {
        kept.edit().clear().apply();
    }

    @Override
    public String find(JoinLink link) {
        Map<String, ?> all = kept.getAll();
        String key = link.server.isEmpty() ? BY_ADDRESS + link.address : BY_SERVER + link.server;
        Object credential = all.get(key);
        return credential == null ? "" : (String) credential;
    }

    @Override
    public void keep(String server, JoinLink link, String credential) throws IOException {
        boolean kept =
                this.kept
                        .edit()
                        .putString(BY_SERVER + server, credential)
                        .putString(BY_ADDRESS + link.address, credential)
                        .commit();
        if (!kept) {
            throw new IOException("the phone's storage took nothing");
        }
    }

    /** Remember where the phone is, to come back with the credential that is kept for it. */
    void remember(JoinLink link) {
        kept.edit().putString(LAST, link.withoutCredential()).apply();
    }
}
