package cleave.core.kernels;

import static org.junit.Assert.assertArrayEquals;
import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertTrue;

import java.nio.ByteBuffer;
import org.junit.Test;

public class NumbersTest {
    @Test
    public void every16BitNumberSurvivesTheWayThereAndBack() {
        for (int bits = 0; bits < 1 << 16; bits++) {
            short half = (short) bits;
            float bf16 = Numbers.fromBf16(half);
            if (Float.isNaN(bf16)) {
                assertTrue(Float.isNaN(Numbers.fromBf16(Numbers.toBf16(bf16))));
            } else {
                assertEquals(half, Numbers.toBf16(bf16));
            }
            float fp16 = Numbers.fromFp16(half);
            if (Float.isNaN(fp16)) {
                assertTrue(Float.isNaN(Numbers.fromFp16(Numbers.toFp16(fp16))));
            } else {
                assertEquals(half, Numbers.toFp16(fp16));
            }
        }
    }

    @Test
    public void halfwayBetweenTwoNumbersTheEvenOneIsTaken() {
        for (int bits = 0; bits < 0x7c00 - 1; bits++) {
            double lower = Numbers.fromFp16((short) bits);
            double upper = Numbers.fromFp16((short) (bits + 1));
            short tie = Numbers.toFp16((float) ((lower + upper) / 2)); // exact in fp32
            assertEquals(bits + (bits & 1), tie);
        }
        for (int bits = 0; bits < 0x7f7f; bits++) {
            float tie = Float.intBitsToFloat((bits << 16) | 0x8000);
            assertEquals((short) (bits + (bits & 1)), Numbers.toBf16(tie));
            assertEquals((short) bits, Numbers.toBf16(Math.nextDown(tie)));
            assertEquals((short) (bits + 1), Numbers.toBf16(Math.nextUp(tie)));
        }
    }

    @Test
    public void whatIsTooLargeBecomesAnInfinity() {
        assertEquals(0x7c00, Numbers.toFp16(65520f));
        assertEquals(0x7bff, Numbers.toFp16(Math.nextDown(65520f)));
        assertEquals((short) 0xfc00, Numbers.toFp16(Float.NEGATIVE_INFINITY));
        assertEquals(0x7f80, Numbers.toBf16(Float.MAX_VALUE));
    }

    @Test
    public void payloadsAreReadAtAnyAlignment() {
        for (DType dtype : DType.values()) {
            ByteBuffer odd = ByteBuffer.allocate(3 + 5 * dtype.itemBytes);
            odd.position(3);
            float[] values = {1, -2, 0.5f, 1024, 0};
            odd.put(Numbers.narrowed(values, dtype));
            odd.position(3);
            float[] read = Numbers.widened(odd.slice().asReadOnlyBuffer(), dtype);
            assertArrayEquals(values, read, 0);
        }
    }
}
