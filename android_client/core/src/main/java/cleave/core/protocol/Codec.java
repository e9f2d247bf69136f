package cleave.core.protocol;

import java.io.IOException;
import java.math.BigInteger;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.Map;
import org.msgpack.core.MessageBufferPacker;
import org.msgpack.core.MessagePack;

/** Messages to bytes and back: one msgpack array {@code [type, fields, payload?]} a message. */
public final class Codec {
    /** Most headers are smaller: so much is copied to be read, and more only if it must be. */
    private static final int PEEK_BYTES = 512;

    private Codec() {}

    /**
     * The message's bytes before its payload's own.
     *
     * @throws IllegalArgumentException when it is larger than the protocol allows
     */
    public static byte[] header(Message message) {
        byte[] header;
        try (MessageBufferPacker packer = MessagePack.newDefaultBufferPacker()) {
            packer.packArrayHeader(message.type.hasPayload ? 3 : 2);
            packer.packString(message.type.wireName);
            write(packer, message.fields());
            if (message.type.hasPayload) {
                packer.packBinaryHeader(message.payload().remaining());
            }
            header = packer.toByteArray();
        } catch (IOException error) {
            throw new IllegalStateException("a buffer in memory cannot fail", error);
        }
        int payload = message.type.hasPayload ? message.payload().remaining() : 0;
        if (header.length > Limits.MAX_HEADER_BYTES
                || payload > Limits.MAX_MESSAGE_BYTES - header.length) {
            throw new IllegalArgumentException(
                    "a " + message.type.wireName + " message of " + ((long) header.length + payload)
                            + " bytes is over the limit");
        }
        return header;
    }

    /**
     * Read one message. Its texts are such that they can be shown. Of a hello in another version
     * only what says so is read.
     *
     * @param bytes from position to limit; the payload is a view of them, which need not be aligned
     * @throws ProtocolException for anything that is not a message of this protocol
     * @throws VersionException for a welcome in another version
     */
    public static Message decode(ByteBuffer bytes) throws ProtocolException {
        int size = bytes.remaining();
        if (size > Limits.MAX_MESSAGE_BYTES) {
            throw new ProtocolException("a message of " + size + " bytes is over the limit");
        }
        try {
            return decode(bytes, Math.min(size, PEEK_BYTES));
        } catch (MsgpackReader.EndOfBytes error) {
            if (size <= PEEK_BYTES) {
                throw error;
            }
        }
        try {
            return decode(bytes, Math.min(size, Limits.MAX_HEADER_BYTES));
        } catch (MsgpackReader.EndOfBytes error) {
            if (size <= Limits.MAX_HEADER_BYTES) {
                throw error;
            }
            throw new ProtocolException("the fields of a message are over the limit of a mebibyte");
        }
    }

    /** A text that a receiver accepts: well-formed, and no longer than the protocol allows. */
    public static String cleanText(String text) {
        byte[] utf8 = text.getBytes(StandardCharsets.UTF_8); // what is no character becomes a "?"
        String clean = new String(utf8, StandardCharsets.UTF_8);
        if (clean.codePointCount(0, clean.length()) <= Limits.MAX_TEXT) {
            return clean;
        }
        return clean.substring(0, clean.offsetByCodePoints(0, Limits.MAX_TEXT));
    }

    /** What a peer says, as it can be shown: on one line, nothing that turns writing around. */
    static String shown(String text) {
        StringBuilder found = new StringBuilder(text.length());
        for (int at = 0; at < text.length(); ) {
            int point = text.codePointAt(at);
            show(point, found);
            at += Character.charCount(point);
        }
        return found.toString();
    }

    private static void show(int point, StringBuilder found) {
        switch (Character.getType(point)) {
            case Character.CONTROL:
                if (Character.isWhitespace(point) || point == 0x85) {
                    found.append(' ');
                }
                break;
            case Character.LINE_SEPARATOR:
            case Character.PARAGRAPH_SEPARATOR:
            case Character.SPACE_SEPARATOR:
                found.append(' ');
                break;
            case Character.FORMAT:
            case Character.SURROGATE:
            case Character.PRIVATE_USE:
            case Character.UNASSIGNED:
                break;
            default:
                found.appendCodePoint(point);
        }
    }

    private static Message decode(ByteBuffer bytes, int windowBytes) throws ProtocolException {
        byte[] window = new byte[windowBytes];
        bytes.duplicate().get(window);
        MsgpackReader reader = new MsgpackReader(window);
        int parts = reader.arrayLength();
        Object name = reader.value();
        Object fields = reader.value();
        if (!(name instanceof String) || !(fields instanceof Map)) {
            throw new ProtocolException(
                    "a message is an array of a type name and a map of fields");
        }
        MessageType type = MessageType.named((String) name);
        if (type == null) {
            throw new ProtocolException("unknown message type");
        }
        if (parts != (type.hasPayload ? 3 : 2)) {
            throw new ProtocolException("a " + type.wireName + " message has " + parts + " parts");
        }
        int length = type.hasPayload ? reader.binLength() : 0;
        int left = bytes.remaining() - reader.offset();
        if (left != length) {
            throw new ProtocolException(
                    type.hasPayload
                            ? "the payload of a " + type.wireName + " message states " + length
                                    + " bytes, " + left + " came"
                            : "bytes follow the end of a " + type.wireName + " message");
        }
        ByteBuffer payload = null;
        if (type.hasPayload) {
            payload = bytes.duplicate();
            payload.position(bytes.position() + reader.offset());
            payload = payload.slice();
        }
        @SuppressWarnings("unchecked") // the reader makes no other maps
        Map<String, Object> given = (Map<String, Object>) fields;
        return Message.checked(type, given, payload);
    }

    private static void write(MessageBufferPacker packer, Object value) throws IOException {
        if (value == null) {
            packer.packNil();
        } else if (value instanceof Map) {
            Map<?, ?> map = (Map<?, ?>) value;
            packer.packMapHeader(map.size());
            for (Map.Entry<?, ?> entry : map.entrySet()) {
                write(packer, entry.getKey());
                write(packer, entry.getValue());
            }
        } else if (value instanceof List) {
            packer.packArrayHeader(((List<?>) value).size());
            for (Object item : (List<?>) value) {
                write(packer, item);
            }
        } else if (value instanceof String) {
            packer.packString((String) value);
        } else if (value instanceof Boolean) {
            packer.packBoolean((Boolean) value);
        } else if (value instanceof Double) {
            packer.packDouble((Double) value);
        } else if (value instanceof BigInteger) {
            packer.packBigInteger((BigInteger) value);
        } else if (value instanceof Long) {
            packer.packLong((Long) value);
        } else {
            throw new IllegalArgumentException("no message holds a " + value.getClass().getName());
        }
    }
}
