package cleave.core.coding;

import cleave.core.kernels.DType;
import cleave.core.protocol.Limits;
import cleave.core.protocol.ProtocolException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.ArrayList;
import java.util.List;
import java.util.zip.DataFormatException;
import java.util.zip.Deflater;
import java.util.zip.Inflater;

/**
 * Fewer bytes for floating-point payloads, exact to the bit: docs/protocol.md, <i>Coding</i>.
 * Exponents are deflated with Huffman codes alone, all else travels as it is; {@code
 * cleave/coding.py} is the same in Python.
 */
public final class Exponents {
    /** Shorter payloads are not worth it. */
    static final int LEAST_BYTES = 16 << 10;

    private static final double WORTH = 0.95; // of the plain size; above it, time for nothing
    private static final int SAMPLE = 4096; // elements
    private static final int LENGTH_BYTES = 4;

    /** A chunk: what is deflated of it, and what is not. */
    private static final class Chunk {
        final ByteBuffer deflated;
        final ByteBuffer plain;

        Chunk(ByteBuffer deflated, ByteBuffer plain) {
            this.deflated = deflated;
            this.plain = plain;
        }
    }

    private Exponents() {}

    /**
     * The coded form of elements, whether that is shorter or not.
     *
     * @param payload from position to limit
     */
    public static ByteBuffer encode(ByteBuffer payload, DType dtype) {
        ByteBuffer left = payload.duplicate();
        List<byte[]> parts = new ArrayList<>();
        int size = 0;
        while (left.hasRemaining()) {
            byte[] chunk =
                    new byte[Math.min(left.remaining(), Limits.CODED_CHUNK * dtype.itemBytes)];
            left.get(chunk);
            byte[] part = encodedChunk(chunk, dtype.itemBytes);
            parts.add(part);
            size += part.length;
        }
        ByteBuffer whole = ByteBuffer.allocate(size);
        for (byte[] part : parts) {
            whole.put(part);
        }
        whole.flip();
        return whole;
    }

    /** The coded form of elements; null if they are few, or it would hardly be shorter. */
    public static ByteBuffer encodeIfShorter(ByteBuffer payload, DType dtype) {
        int plain = payload.remaining();
        if (plain < LEAST_BYTES || sampledRatio(payload, dtype.itemBytes) > WORTH) {
            return null;
        }
        ByteBuffer coded = encode(payload, dtype);
        return coded.remaining() < plain ? coded : null;
    }

    /**
     * The elements of a coded form. It takes memory for them once the coded form is seen to have
     * the length that theirs has, which is more than half of what they take.
     *
     * @param coded from position to limit
     * @param bytes what the elements take
     * @throws ProtocolException when it is not the coded form of so many bytes of elements
     */
    public static ByteBuffer decode(ByteBuffer coded, DType dtype, long bytes)
            throws ProtocolException {
        List<Chunk> chunks = chunks(coded, dtype, bytes);
        byte[] payload = new byte[(int) bytes];
        int step = Limits.CODED_CHUNK * dtype.itemBytes;
        for (int i = 0; i < chunks.size(); i++) {
            int end = Math.min(payload.length, (i + 1) * step);
            decodeChunk(chunks.get(i), payload, i * step, end, dtype.itemBytes);
        }
        return ByteBuffer.wrap(payload);
    }

    private static List<Chunk> chunks(ByteBuffer coded, DType dtype, long bytes)
            throws ProtocolException {
        if (bytes % dtype.itemBytes != 0) {
            throw new ProtocolException("no " + dtype.wireName + " array has " + bytes + " bytes");
        }
        ByteBuffer all = coded.slice().order(ByteOrder.LITTLE_ENDIAN);
        List<Chunk> found = new ArrayList<>();
        long at = 0;
        for (long left = bytes / dtype.itemBytes; left > 0; left -= Limits.CODED_CHUNK) {
            long begin = at + LENGTH_BYTES;
            long length = begin > all.limit() ? 0 : all.getInt((int) at) & 0xffffffffL;
            long middle = begin + length;
            at = middle + Math.min(left, Limits.CODED_CHUNK) * (dtype.itemBytes - 1);
            if (at > all.limit()) {
                throw new ProtocolException(
                        "a coded array of " + bytes + " bytes is cut off after " + all.limit()
                                + " bytes");
            }
            found.add(new Chunk(part(all, begin, middle), part(all, middle, at)));
        }
        if (at < all.limit()) {
            throw new ProtocolException(
                    all.limit() - at + " bytes follow the end of a coded array");
        }
        return found;
    }

    private static ByteBuffer part(ByteBuffer all, long begin, long end) {
        ByteBuffer view = all.duplicate();
        view.position((int) begin);
        view.limit((int) end);
        return view;
    }

    /** The coded form of a chunk. Of an element, its last two bytes are its word. */
    private static byte[] encodedChunk(byte[] payload, int itemBytes) {
        int count = payload.length / itemBytes;
        byte[] upper = new byte[count];
        byte[] plain = new byte[count * (itemBytes - 1)];
        for (int i = 0, at = itemBytes - 2; i < count; i++, at += itemBytes) {
            int low = payload[at] & 0xff;
            int high = payload[at + 1] & 0xff;
            upper[i] = (byte) (high << 1 | low >> 7);
            plain[i] = (byte) (low << 1 | high >> 7);
        }
        if (itemBytes == 4) {
            for (int i = 0, to = count; i < payload.length; i += 4, to += 2) {
                plain[to] = payload[i];
                plain[to + 1] = payload[i + 1];
            }
        }
        byte[] deflated = new byte[deflatedRoom(count)];
        int length = deflate(upper, deflated);
        ByteBuffer whole =
                ByteBuffer.allocate(LENGTH_BYTES + length + plain.length)
                        .order(ByteOrder.LITTLE_ENDIAN);
        whole.putInt(length).put(deflated, 0, length).put(plain);
        return whole.array();
    }

    /** No stream of zlib's is longer: what does not get shorter is stored. */
    private static int deflatedRoom(int bytes) {
        return bytes + bytes / 100 + 64;
    }

    private static int deflate(byte[] data, byte[] target) {
        Deflater deflater = new Deflater(Deflater.BEST_SPEED);
        try {
            deflater.setStrategy(Deflater.HUFFMAN_ONLY);
            deflater.setInput(data);
            deflater.finish();
            int length = 0;
            while (!deflater.finished()) {
                if (length == target.length) {
                    throw new IllegalStateException("deflate needs more room than it may");
                }
                // The first call may return nothing: it takes up the strategy alone.
                length += deflater.deflate(target, length, target.length - length);
            }
            return length;
        } finally {
            deflater.end();
        }
    }

    private static void decodeChunk(Chunk chunk, byte[] payload, int begin, int end, int itemBytes)
            throws ProtocolException {
        int count = (end - begin) / itemBytes;
        byte[] upper = inflate(chunk.deflated, count);
        byte[] plain = new byte[chunk.plain.remaining()];
        chunk.plain.get(plain);
        for (int i = 0, at = begin + itemBytes - 2; i < count; i++, at += itemBytes) {
            int exponent = upper[i] & 0xff;
            int rest = plain[i] & 0xff;
            payload[at] = (byte) (exponent << 7 | rest >> 1);
            payload[at + 1] = (byte) (rest << 7 | exponent >> 1);
        }
        if (itemBytes == 4) {
            for (int at = begin, from = count; at < end; at += 4, from += 2) {
                payload[at] = plain[from];
                payload[at + 1] = plain[from + 1];
            }
        }
    }

    /** The bytes of a stream, and room for one more, which it must not have. */
    private static byte[] inflate(ByteBuffer stream, int count) throws ProtocolException {
        byte[] deflated = new byte[stream.remaining()];
        stream.get(deflated);
        byte[] found = new byte[count + 1];
        Inflater inflater = new Inflater();
        try {
            inflater.setInput(deflated);
            int length = 0;
            while (!inflater.finished() && length <= count) {
                int more = inflater.inflate(found, length, found.length - length);
                if (more == 0 && (inflater.needsInput() || inflater.needsDictionary())) {
                    break;
                }
                length += more;
            }
            if (length != count || !inflater.finished() || inflater.getRemaining() > 0) {
                throw new ProtocolException(
                        "a coded array does not inflate to exactly " + count + " exponents");
            }
            return found;
        } catch (DataFormatException error) {
            throw new ProtocolException("a coded array cannot be inflated: " + error.getMessage());
        } finally {
            inflater.end();
        }
    }

    /** The coded size over the plain size, as the entropy of some elements has it. */
    private static double sampledRatio(ByteBuffer payload, int itemBytes) {
        int count = payload.remaining() / itemBytes;
        int step = Math.max(1, count / SAMPLE);
        int[] counts = new int[256];
        int total = 0;
        for (int i = 0; i < count; i += step, total++) {
            int at = payload.position() + (i + 1) * itemBytes - 2;
            counts[(payload.get(at + 1) << 1 | (payload.get(at) & 0xff) >> 7) & 0xff]++;
        }
        double bits = 0;
        for (int often : counts) {
            if (often > 0) {
                double share = (double) often / total;
                bits -= share * Math.log(share) / Math.log(2);
            }
        }
        return (itemBytes - 1 + bits / 8) / itemBytes;
    }
}
