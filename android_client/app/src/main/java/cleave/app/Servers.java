package cleave.app;

import android.content.Context;
import android.content.SharedPreferences;
import cleave.core.CredentialStore;
import cleave.core.FileCredentialStore;
import cleave.core.InvalidLinkException;
import cleave.core.JoinLink;
import java.io.File;
import java.io.IOException;

/**
 * The server that this phone may come back to, and its credentials for servers, in the app's
 * private storage; nothing of it is backed up.
 */
final class Servers {
    private static final String LAST = "last";
    private static final String WORKING = "working";

    private final SharedPreferences kept;
    private final FileCredentialStore credentials;

    Servers(Context context) {
        kept = context.getSharedPreferences("servers", Context.MODE_PRIVATE);
        credentials = new FileCredentialStore(new File(context.getFilesDir(), "credentials"));
    }

    CredentialStore credentials() {
        return credentials;
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

    /** Remember where the phone is, to come back with the credential that is kept for it. */
    void remember(JoinLink link) {
        kept.edit()
                .putString(LAST, link.withoutCredential())
                .putBoolean(WORKING, true)
                .apply();
    }

    /** Whether it was welcome at the last server, and did not leave: it may go on unasked. */
    boolean isWorking() {
        return kept.getBoolean(WORKING, false);
    }

    void setWorking(boolean working) {
        kept.edit().putBoolean(WORKING, working).apply();
    }

    /** Whether there is anything to forget. */
    boolean any() {
        return last() != null || !credentials.kept().isEmpty();
    }

    /**
     * Forget all of it.
     *
     * @throws IOException when a credential cannot be removed
     */
    void forget() throws IOException {
        kept.edit().clear().apply();
        for (FileCredentialStore.Kept credential : credentials.kept()) {
            credentials.remove(credential);
        }
    }
}
