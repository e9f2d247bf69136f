package cleave.core.protocol;

import java.util.Locale;

/** What peers may do besides what every peer of this version can. */
public enum Feature {
    /** The server measures links. */
    MEASURE,
    /** Arrays come and go coded. */
    CODING,
    /** Whole layers are run. */
    GRAPHS,
    /** A device goes where a server sends it. */
    MOVES,
    /** A device whose connection was lost continues with its arrays. */
    KEEPS;

    /** Its name in messages. */
    public final String wireName;

    Feature() {
        wireName = name().toLowerCase(Locale.ROOT);
    }
}
