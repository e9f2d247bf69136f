package cleave.core.coding;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertNull;
import static org.junit.Assert.assertThrows;
import static org.junit.Assert.assertTrue;

import cleave.core.kernels.DType;
import cleave.core.protocol.Message;
import cleave.core.protocol.MessageType;
import cleave.core.protocol.ProtocolException;
import cleave.core.protocol.Vectors;
import com.google.gson.JsonObject;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Arrays;
import java.util.Random;
import java.util.zip.Deflater;
import org.junit.Test;

public class ExponentsTest {
    private static final int[] COUNTS = {0, 1, 2, 3, 255, 4097, 100_003};

    private final Random random = new Random(7);

    @Test
    public void decodesTheVectorsAndRefusesWhatIsNone() throws Exception {
        for (JsonObject vector : Vectors.read("coding.json")) {
            DType dtype = DType.named(vector.get("dtype").getAsString());
            ByteBuffer coded = ByteBuffer.wrap(Vectors.bytes(vector.get("coded")));
            long bytes = vector.get("payload_bytes").getAsLong();
            if (vector.has("payload")) {
                ByteBuffer payload = ByteBuffer.wrap(Vectors.bytes(vector.get("payload")));
                assertEquals(Vectors.name(vector), payload, Exponents.decode(coded, dtype, bytes));
            } else {
                assertThrows(
                        Vectors.name(vector),
                        ProtocolException.class,
                        () -> Exponents.decode(coded, dtype, bytes));
            }
        }
    }

    @Test
    public void anyBitsComeBack() throws Exception {
        for (DType dtype : DType.values()) {
            for (int count : COUNTS) {
                // Among random bits are NaNs of all kinds, infinities and subnormal numbers.
                for (byte[] payload : Arrays.asList(noise(count, dtype), weights(count, dtype))) {
                    ByteBuffer coded = Exponents.encode(shifted(payload), dtype);
                    ByteBuffer back = Exponents.decode(coded, dtype, payload.length);
                    assertEquals(ByteBuffer.wrap(payload), back);
                }
            }
        }
    }

    @Test
    public void anArrayOfTwoChunksComesBack() throws Exception {
        byte[] payload = weights((1 << 20) + 7, DType.BF16);
        ByteBuffer coded = Exponents.encode(ByteBuffer.wrap(payload), DType.BF16);
        assertTrue(coded.remaining() < 0.7 * payload.length);
        assertEquals(
                ByteBuffer.wrap(payload), Exponents.decode(coded, DType.BF16, payload.length));
    }

    @Test
    public void noByteCanBeLeftOutOrAdded() {
        byte[] payload = weights(50, DType.FP32);
        byte[] coded = Exponents.encode(ByteBuffer.wrap(payload), DType.FP32).array();
        for (int length = 0; length <= coded.length + 1; length++) {
            ByteBuffer other = ByteBuffer.wrap(Arrays.copyOf(coded, length));
            if (length != coded.length) {
                assertRefused(other, DType.FP32, payload.length);
            }
        }
        for (long bytes : new long[] {payload.length - 4, payload.length + 4, 1L << 62}) {
            assertRefused(ByteBuffer.wrap(coded), DType.FP32, bytes);
        }
    }

    @Test
    public void whatHasChangedOnTheWayDoesNoHarm() {
        byte[] payload = weights(300, DType.BF16);
        byte[] coded = Exponents.encode(ByteBuffer.wrap(payload), DType.BF16).array();
        for (int at = 0; at < coded.length; at++) {
            byte[] changed = coded.clone();
            changed[at] ^= (byte) (1 << random.nextInt(8));
            try {
                ByteBuffer back =
                        Exponents.decode(ByteBuffer.wrap(changed), DType.BF16, payload.length);
                assertEquals(payload.length, back.remaining());
            } catch (ProtocolException error) {
                // That, or another array; nothing else.
            }
        }
    }

    @Test
    public void aBombIsNotUnpacked() {
        byte[] stream = new byte[1 << 20];
        Deflater deflater = new Deflater();
        deflater.setInput(new byte[50 << 20]);
        deflater.finish();
        int length = deflater.deflate(stream);
        deflater.end();
        ByteBuffer coded =
                ByteBuffer.allocate(4 + length + 2).order(ByteOrder.LITTLE_ENDIAN);
        coded.putInt(length).put(stream, 0, length).put(new byte[2]).flip();
        assertRefused(coded, DType.BF16, 4);
    }

    @Test
    public void onlyWhatGetsShorterIsCoded() {
        byte[] payload = weights(Exponents.LEAST_BYTES / 2, DType.BF16);
        assertTrue(coded(payload).remaining() < payload.length);
        assertNull(coded(Arrays.copyOf(payload, payload.length - 2)));
        assertNull(coded(noise(payload.length / 2, DType.BF16)));
    }

    @Test
    public void aResultIsCodedWithItsFields() throws Exception {
        byte[] payload = weights(100 * 100, DType.FP32);
        Message plain =
                Message.of(MessageType.RESULT)
                        .with("id", 5)
                        .with("rows", 100)
                        .with("columns", 100)
                        .with("dtype", "fp32")
                        .with("compute_s", 0.5)
                        .payload(ByteBuffer.wrap(payload))
                        .build();
        Message coded = Coded.result(plain);
        assertEquals(MessageType.RESULT_CODED, coded.type);
        assertEquals(plain.fields(), coded.fields());
        assertEquals(
                plain.payload(),
                Exponents.decode(coded.payload(), DType.FP32, payload.length));
    }

    private static ByteBuffer coded(byte[] payload) {
        return Exponents.encodeIfShorter(ByteBuffer.wrap(payload), DType.BF16);
    }

    private static void assertRefused(ByteBuffer coded, DType dtype, long bytes) {
        assertThrows(ProtocolException.class, () -> Exponents.decode(coded, dtype, bytes));
    }

    private byte[] noise(int count, DType dtype) {
        byte[] payload = new byte[count * dtype.itemBytes];
        random.nextBytes(payload);
        return payload;
    }

    /** Numbers as a model has them; in 16 bits cut off to bf16, whatever the dtype is. */
    private byte[] weights(int count, DType dtype) {
        byte[] payload = new byte[count * dtype.itemBytes];
        for (int at = 0; at < payload.length; at += dtype.itemBytes) {
            int bits = Float.floatToRawIntBits((float) (0.02 * random.nextGaussian()));
            for (int i = 0; i < dtype.itemBytes; i++) {
                payload[at + i] = (byte) (bits >> 8 * (4 - dtype.itemBytes + i));
            }
        }
        return payload;
    }

    /** The same bytes within others. */
    private static ByteBuffer shifted(byte[] payload) {
        ByteBuffer whole = ByteBuffer.allocateDirect(payload.length + 5);
        whole.position(3);
        whole.put(payload);
        whole.limit(3 + payload.length);
        whole.position(3);
        return whole.asReadOnlyBuffer();
    }
}
