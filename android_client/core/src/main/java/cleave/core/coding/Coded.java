package cleave.core.coding;

import cleave.core.kernels.DType;
import cleave.core.protocol.Message;
import cleave.core.protocol.MessageType;
import cleave.core.protocol.ProtocolException;
import java.nio.ByteBuffer;

/** Messages with coded payloads, from plain ones and back. */
public final class Coded {
    private Coded() {}

    /**
     * The {@code put} that a {@code put_coded} stands for.
     *
     * @param bytes what its array takes
     * @throws ProtocolException when its payload is not the coded form of so many bytes
     */
    public static Message put(Message coded, DType dtype, long bytes) throws ProtocolException {
        return Message.of(MessageType.PUT)
                .with("id", coded.integer("id"))
                .with("rows", coded.integer("rows"))
                .with("columns", coded.integer("columns"))
                .with("dtype", dtype.wireName)
                .payload(Exponents.decode(coded.payload(), dtype, bytes))
                .build();
    }

    /** A {@code result} with its elements coded; itself where that is not worth it. */
    public static Message result(Message plain) {
        DType dtype = DType.named(plain.text("dtype"));
        ByteBuffer coded = Exponents.encodeIfShorter(plain.payload(), dtype);
        if (coded == null) {
            return plain;
        }
        return Message.of(MessageType.RESULT_CODED)
                .with("id", plain.integer("id"))
                .with("rows", plain.integer("rows"))
                .with("columns", plain.integer("columns"))
                .with("dtype", dtype.wireName)
                .with("compute_s", plain.real("compute_s"))
                .payload(coded)
                .build();
    }
}
