package cleave.core.graphs;

import java.nio.ByteBuffer;

/**
 * Reads the fields of a protobuf message in place: numbers, and values that are integers or bytes.
 * Which bytes are a message again says the format, not the bytes.
 */
final class ProtobufFields {
    /** Bytes are not a message. */
    static final class ProtobufException extends Exception {
        private static final long serialVersionUID = 1;

        ProtobufException(String text) {
            super(text);
        }
    }

    private static final int VARINT = 0;
    private static final int FIXED_64 = 1;
    private static final int BYTES = 2;
    private static final int FIXED_32 = 5;
    private static final int LONGEST_VARINT = 10; // bytes, for 64 bits
    private static final long LARGEST_NUMBER = (1 << 29) - 1; // readers disagree beyond it

    private final ByteBuffer rest;
    private int number;
    private long integer;
    private ByteBuffer bytes; // null where the value is an integer

    /** @param message from position to limit; not copied */
    ProtobufFields(ByteBuffer message) {
        rest = message.duplicate();
    }

    /** Go to the next field; returns whether there is one. */
    boolean next() throws ProtobufException {
        if (!rest.hasRemaining()) {
            return false;
        }
        long key = varint(rest);
        long found = key >>> 3;
        if (found < 1 || found > LARGEST_NUMBER) {
            throw new ProtobufException("a field has the number " + found);
        }
        number = (int) found;
        bytes = null;
        switch ((int) (key & 7)) {
            case VARINT:
                integer = varint(rest);
                return true;
            case FIXED_64:
                bytes = take(8);
                return true;
            case BYTES:
                bytes = take(varint(rest));
                return true;
            case FIXED_32:
                bytes = take(4);
                return true;
            default:
                throw new ProtobufException("field " + number + " is of an unknown kind");
        }
    }

    /** The field's number. */
    int number() {
        return number;
    }

    /** Whether its value is an integer other than 0, or bytes of which there are some. */
    boolean isSomething() {
        return bytes == null ? integer != 0 : bytes.hasRemaining();
    }

    /** Whether its value is an integer. */
    boolean isInteger() {
        return bytes == null;
    }

    /** Its value, where that is an integer, with the sign that its bits have. */
    long integer() {
        return integer;
    }

    /** A view of its bytes. */
    ByteBuffer content() throws ProtobufException {
        if (bytes == null) {
            throw new ProtobufException("an integer stands for a text or a message");
        }
        return bytes.duplicate();
    }

    /** The integers of a repeated field, without signs: one of them, or many, packed. */
    Integers integers() {
        return new Integers(bytes == null ? null : bytes.duplicate(), integer);
    }

    private ByteBuffer take(long length) throws ProtobufException {
        if (length < 0 || length > rest.remaining()) {
            throw new ProtobufException("field " + number + " ends after its message");
        }
        ByteBuffer found = rest.slice();
        found.limit((int) length);
        rest.position(rest.position() + (int) length);
        return found;
    }

    /** An integer of 64 bits without a sign. */
    private static long varint(ByteBuffer from) throws ProtobufException {
        long value = 0;
        for (int place = 0; place < LONGEST_VARINT && from.hasRemaining(); place++) {
            int part = from.get();
            value |= (part & 0x7fL) << (7 * place); // of the last byte one bit is left
            if (part >= 0) {
                return value;
            }
        }
        throw new ProtobufException("an integer does not end");
    }

    /** Integers one after another. */
    static final class Integers {
        private final ByteBuffer packed;
        private final long only;
        private boolean taken;

        private Integers(ByteBuffer packed, long only) {
            this.packed = packed;
            this.only = only;
        }

        boolean hasNext() {
            return packed == null ? !taken : packed.hasRemaining();
        }

        long next() throws ProtobufException {
            taken = true;
            return packed == null ? only : varint(packed);
        }
    }
}
