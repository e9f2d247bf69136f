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
    private static final String ASKED = "asked";
    private static final String LAST = "last";
    private static final String PAUSED = "paused";
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

    /**
     * Where the phone was last, or is to be and was not welcomed yet, then with its join code; null
     * where there is none.
     */
    JoinLink last() {
        String text = kept.getString(ASKED, kept.getString(LAST, ""));
        if (text.isEmpty()) {
            return null;
        }
        try {
            return JoinLink.parse(text);
        } catch (InvalidLinkException error) {
            throw new IllegalStateException("a link that was kept is none", error);
        }
    }

    /**
     * The owner agreed to join. It may be long until the conditions hold, and the system may end
     * the app before.
     *
     * @param text a join link, with its code; null for the last server
     */
    void begin(String text) {
        SharedPreferences.Editor edit = kept.edit().putBoolean(WORKING, true);
        if (text != null) {
            edit.putString(ASKED, text);
        }
        edit.apply();
    }

    /** Welcome: from now on there is a credential to come back with, and the code is used up. */
    void remember(JoinLink link) {
        kept.edit().putString(LAST, link.withoutCredential()).remove(ASKED).apply();
    }

    /** Whether the owner agreed to join, and it did not end: it may go on unasked. */
    boolean isWorking() {
        return kept.getBoolean(WORKING, false);
    }

    /**
     * It ended.
     *
     * @param refused by the server, which then refuses the same code again
     */
    void end(boolean refused) {
        SharedPreferences.Editor edit = kept.edit().remove(WORKING).remove(PAUSED);
        if (refused) {
            edit.remove(ASKED);
        }
        edit.apply();
    }

    /** Whether the owner paused it, and so it stays if the system starts the app again. */
    boolean isPaused() {
        return kept.getBoolean(PAUSED, false);
    }

    void setPaused(boolean paused) {
        kept.edit().putBoolean(PAUSED, paused).apply();
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
