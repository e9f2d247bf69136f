package cleave.core.coding;

import cleave.core.kernels.DType;
import cleave.core.protocol.ProtocolException;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.Paths;
import java.util.Locale;

/**
 * Codes and decodes the elements in a file, on one thread, and writes the coded form to another.
 * Prints the best times of a number of tries, as JSON. Arguments: dtype, elements' file, coded
 * file, tries.
 */
public final class CodingBenchmark {
    private static final double NANOS_PER_S = 1e9;

    private CodingBenchmark() {}

    public static void main(String[] arguments) throws IOException, ProtocolException {
        DType dtype = DType.named(arguments[0]);
        Path target = Paths.get(arguments[2]);
        ByteBuffer payload = ByteBuffer.wrap(Files.readAllBytes(Paths.get(arguments[1])));
        double encodeS = Double.POSITIVE_INFINITY;
        double decodeS = Double.POSITIVE_INFINITY;
        for (int left = Integer.parseInt(arguments[3]); left > 0; left--) {
            long began = System.nanoTime();
            ByteBuffer coded = Exponents.encode(payload, dtype);
            long middle = System.nanoTime();
            ByteBuffer back = Exponents.decode(coded, dtype, payload.remaining());
            long ended = System.nanoTime();
            if (!back.equals(payload)) {
                throw new IllegalStateException("coding is not exact");
            }
            encodeS = Math.min(encodeS, (middle - began) / NANOS_PER_S);
            decodeS = Math.min(decodeS, (ended - middle) / NANOS_PER_S);
            Files.write(target, coded.array());
        }
        System.out.printf(
                Locale.ROOT, "{\"encode_s\": %.6f, \"decode_s\": %.6f}%n", encodeS, decodeS);
    }
}
