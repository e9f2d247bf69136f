package cleave.core.protocol;

/** Why a session ends with {@code error}; a server may know more. */
public enum ErrorCode {
    VERSION("version"),
    CREDENTIAL("credential"),
    PROTOCOL("protocol"),
    LIMIT("limit"),
    REQUEST("request"),
    QUARANTINED("quarantined"),
    DUPLICATE("duplicate");

    public final String wireName;

    ErrorCode(String wireName) {
        this.wireName = wireName;
    }

    /** The code of that name in messages, or null. */
    public static ErrorCode named(String wireName) {
        for (ErrorCode code : values()) {
            if (code.wireName.equals(wireName)) {
                return code;
            }
        }
        return null;
    }
}
