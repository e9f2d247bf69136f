package cleave.core.graphs;

/** Elements as graphs take them; those in 16 bits are widened before. */
public enum ElementType {
    FLOAT32("fp32", 4),
    INT64("int64", 8),
    BOOL("bool", 1),
    UINT8("uint8", 1);

    /** Its name in messages. */
    public final String wireName;

    /** Bytes of one element. */
    public final int itemBytes;

    ElementType(String wireName, int itemBytes) {
        this.wireName = wireName;
        this.itemBytes = itemBytes;
    }

    /** The type of that name that only graphs take, or null. */
    public static ElementType ofIndices(String wireName) {
        for (ElementType type : values()) {
            if (type != FLOAT32 && type.wireName.equals(wireName)) {
                return type;
            }
        }
        return null;
    }
}
