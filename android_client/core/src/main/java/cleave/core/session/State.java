package cleave.core.session;

/** What a guest does at the moment. */
public enum State {
    /** Finding out how to multiply here. */
    STARTING,
    CONNECTING,
    WORKING,
    /** Answering what it was asked, before it pauses or stops. */
    DRAINING,
    /** Its owner's conditions do not allow work now. */
    PAUSED,
    /** Until the server is tried again. */
    WAITING,
    /** It will not come back by itself. */
    ENDED
}
