package cleave.core;

import java.io.IOException;

/** Keeps the credentials that servers gave this device for a join code, unreadable to others. */
public interface CredentialStore {
    /**
     * The credential for a link's server: by the server's id where the link tells it, else by its
     * address. Empty where there is none, and where the link's connection is less protected than
     * the one it was given over.
     */
    String find(JoinLink link);

    /**
     * Keep a credential; an earlier one for the same server is replaced, if the server has the same
     * pinned certificate or, without one, address.
     *
     * @param server the server's id, as its welcome told it
     * @param link that led to it
     * @throws IOException when it cannot be kept: the device needs a new code after this session
     */
    void keep(String server, JoinLink link, String credential) throws IOException;
}
