package cleave.core.protocol;

/** What a field holds, by the names of docs/protocol.md's field types, and how Java holds it. */
enum Kind {
    /** Long, 0 or more. */
    ID,
    /** Long, 0 or more. */
    COUNT,
    /** Double, finite, 0 or more. */
    REAL,
    /** String of at most MAX_TEXT code points. */
    TEXT,
    /** Likewise, compared and never shown: kept as it came. */
    SECRET,
    /** Boolean. */
    BOOL,
    /** List of Long, at most MAX_IDS. */
    IDS,
    /** List of Long, at most MAX_RUN_INPUTS. */
    INPUTS,
    /** List of String, at most MAX_IDS. */
    TEXTS,
    /** Map from String to Double, all finite. */
    VALUES,
    /** Map from String to untyped values. */
    MAP,
    /** String: "device" or "operator". */
    ROLE
}
