package cleave.core.kernels;

/** Element types of matrices; their bytes are little-endian. */
public enum DType {
    FP32("fp32", 4),
    BF16("bf16", 2),
    FP16("fp16", 2);

    /** Its name in messages. */
    public final String wireName;

    /** Bytes of one element. */
    public final int itemBytes;

    DType(String wireName, int itemBytes) {
        this.wireName = wireName;
        this.itemBytes = itemBytes;
    }

    /** The dtype of that name in messages, or null. */
    public static DType named(String wireName) {
        for (DType dtype : values()) {
            if (dtype.wireName.equals(wireName)) {
                return dtype;
            }
        }
        return null;
    }
}
