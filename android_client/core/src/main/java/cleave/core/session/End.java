package cleave.core.session;

/** How a session ended. */
public enum End {
    /** The server said goodbye, perhaps only for now. */
    BYE,
    /** The server refused the device, or ended the session as the device's fault. */
    REFUSED,
    /** The connection is gone, or never was. */
    LOST,
    /**
     * Another server than the link means answered, or one whose certificate is not trusted: on a
     * phone perhaps only the sign-in page of a network.
     */
    STRANGER,
    /** We closed it. */
    LEFT
}
