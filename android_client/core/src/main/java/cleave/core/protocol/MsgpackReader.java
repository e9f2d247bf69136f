package cleave.core.protocol;

import java.io.IOException;
import java.math.BigInteger;
import java.nio.ByteBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.msgpack.core.MessageFormat;
import org.msgpack.core.MessageInsufficientBufferException;
import org.msgpack.core.MessagePack;
import org.msgpack.core.MessagePackException;
import org.msgpack.core.MessageUnpacker;
import org.msgpack.value.ValueType;

/**
 * Reads msgpack as strictly as the protocol asks: lengths are held against the bytes that are there
 * before memory is set aside, and no nesting is too deep to be refused.
 *
 * <p>Values are null, Boolean, Long, BigInteger beyond that, Double, String, List and Map with
 * String keys.
 */
final class MsgpackReader {
    /** The bytes end before the value does. */
    static final class EndOfBytes extends ProtocolException {
        private static final long serialVersionUID = 1;

        EndOfBytes() {
            super("a message ends before it is complete");
        }
    }

    private final MessageUnpacker unpacker;
    private final int size;

    MsgpackReader(byte[] bytes) {
        unpacker = MessagePack.newDefaultUnpacker(bytes);
        size = bytes.length;
    }

    /** Offset of the next byte. */
    int offset() {
        return (int) unpacker.getTotalReadBytes();
    }

    /** The number of items of the array that begins here. */
    int arrayLength() throws ProtocolException {
        return read(
                () -> {
                    expect(unpacker.getNextFormat().getValueType() == ValueType.ARRAY, "an array");
                    return unpacker.unpackArrayHeader();
                });
    }

    /** The length of the bin that begins here; its bytes follow. */
    int binLength() throws ProtocolException {
        return read(
                () -> {
                    expect(unpacker.getNextFormat().getValueType() == ValueType.BINARY, "a bin");
                    return unpacker.unpackBinaryHeader();
                });
    }

    /**
     * One value, whole.
     *
     * @throws ProtocolException for bins, ext types, keys that are no texts, broken UTF-8, and
     *     depths of 1000 and more
     */
    Object value() throws ProtocolException {
        return read(() -> value(0));
    }

    private interface Reading<T> {
        T read() throws IOException, ProtocolException;
    }

    /** What the library throws for bad bytes, in our words. */
    private static <T> T read(Reading<T> reading) throws ProtocolException {
        try {
            return reading.read();
        } catch (MessageInsufficientBufferException error) {
            throw new EndOfBytes();
        } catch (IOException | MessagePackException error) {
            throw new ProtocolException("not a message: " + error.getClass().getSimpleName());
        }
    }

    private Object value(int depth) throws IOException, ProtocolException {
        if (depth > Limits.MAX_DEPTH) {
            throw new ProtocolException("a message is nested too deep");
        }
        MessageFormat format = unpacker.getNextFormat();
        switch (format.getValueType()) {
            case NIL:
                expect(format == MessageFormat.NIL, "a value"); // 0xc1 counts as nil there
                unpacker.unpackNil();
                return null;
            case BOOLEAN:
                return unpacker.unpackBoolean();
            case INTEGER:
                return integer(format);
            case FLOAT:
                return unpacker.unpackDouble();
            case STRING:
                return text();
            case ARRAY:
                return array(depth);
            case MAP:
                return map(depth);
            default:
                throw new ProtocolException("a bin or an ext type where a value begins");
        }
    }

    private Number integer(MessageFormat format) throws IOException {
        if (format != MessageFormat.UINT64) {
            return unpacker.unpackLong();
        }
        BigInteger found = unpacker.unpackBigInteger();
        return found.bitLength() < Long.SIZE ? (Number) found.longValue() : found;
    }

    private String text() throws IOException, ProtocolException {
        int length = unpacker.unpackRawStringHeader();
        expectLeft(length);
        ByteBuffer bytes = ByteBuffer.wrap(unpacker.readPayload(length));
        try {
            return StandardCharsets.UTF_8.newDecoder().decode(bytes).toString();
        } catch (CharacterCodingException error) {
            throw new ProtocolException("a text of a message is not UTF-8");
        }
    }

    private List<Object> array(int depth) throws IOException, ProtocolException {
        int length = unpacker.unpackArrayHeader();
        expectLeft(length);
        List<Object> items = new ArrayList<>();
        for (int i = 0; i < length; i++) {
            items.add(value(depth + 1));
        }
        return items;
    }

    private Map<String, Object> map(int depth) throws IOException, ProtocolException {
        int length = unpacker.unpackMapHeader();
        expectLeft(2L * length);
        Map<String, Object> map = new LinkedHashMap<>();
        for (int i = 0; i < length; i++) {
            expect(unpacker.getNextFormat().getValueType() == ValueType.STRING, "a name");
            String key = text();
            map.put(key, value(depth + 1));
        }
        return map;
    }

    private void expectLeft(long items) throws EndOfBytes {
        if (items > size - unpacker.getTotalReadBytes()) {
            throw new EndOfBytes();
        }
    }

    private static void expect(boolean right, String what) throws ProtocolException {
        if (!right) {
            throw new ProtocolException("a message holds something else where " + what + " begins");
        }
    }
}
