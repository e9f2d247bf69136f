package cleave.core.kernels;

import java.io.BufferedInputStream;
import java.io.BufferedOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.util.Collections;

/**
 * Multiplies what comes on standard input until that ends. Argument: threads.
 *
 * <p>All numbers are big-endian ints. A request: inner loop, dtype of the operands, dtype of the
 * result (each by its place in its enum), transposeA, transposeB (0 or 1); then a and b, each as
 * rows, columns, length in bytes, elements. The answer: length in bytes, elements.
 */
public final class KernelServer {
    private KernelServer() {}

    public static void main(String[] arguments) throws IOException {
        int threads = Integer.parseInt(arguments[0]);
        InnerLoop[] loops = InnerLoop.values();
        CpuKernel[] kernels = new CpuKernel[loops.length];
        for (InnerLoop loop : loops) {
            kernels[loop.ordinal()] = new CpuKernel(threads, KernelServer::daemon, loop);
        }
        // The streams are the process's own, which closes them.
        DataInputStream in = new DataInputStream(new BufferedInputStream(System.in));
        DataOutputStream out = new DataOutputStream(new BufferedOutputStream(System.out));
        for (; ; ) {
            in.mark(1);
            if (in.read() < 0) {
                return;
            }
            in.reset();
            CpuKernel kernel = kernels[in.readInt()];
            ByteBuffer result = kernel.multiply(product(in));
            out.writeInt(result.remaining());
            out.write(result.array(), result.arrayOffset() + result.position(), result.remaining());
            out.flush();
        }
    }

    private static Product product(DataInputStream in) throws IOException {
        DType inputs = DType.values()[in.readInt()];
        DType out = DType.values()[in.readInt()];
        boolean transposeA = in.readInt() == 1;
        boolean transposeB = in.readInt() == 1;
        Matrix a = matrix(in, inputs);
        Matrix b = matrix(in, inputs);
        long rows = transposeA ? a.columns : a.rows;
        long columns = transposeB ? b.rows : b.columns;
        return new Product(
                Collections.singletonList(new Product.Pair(a, b)),
                transposeA,
                transposeB,
                rows,
                columns,
                out);
    }

    private static Matrix matrix(DataInputStream in, DType dtype) throws IOException {
        int rows = in.readInt();
        int columns = in.readInt();
        byte[] elements = new byte[in.readInt()];
        in.readFully(elements);
        return new Matrix(rows, columns, dtype, ByteBuffer.wrap(elements));
    }

    private static Thread daemon(Runnable task) {
        Thread thread = new Thread(task, "cleave-kernel");
        thread.setDaemon(true);
        return thread;
    }
}
