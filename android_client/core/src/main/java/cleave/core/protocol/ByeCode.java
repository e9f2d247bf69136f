package cleave.core.protocol;

/** Why a session ends with {@code bye}; a server may know more. */
public enum ByeCode {
    CLOSING("closing"),
    DRAINED("drained"),
    MEASURED("measured"),
    LEAVING("leaving"),
    MOVED("moved");

    public final String wireName;

    ByeCode(String wireName) {
        this.wireName = wireName;
    }

    /** Whether a text in a message is this code. */
    public boolean is(String code) {
        return wireName.equals(code);
    }
}
