package cleave.core.session;

import cleave.core.kernels.Kernel;
import cleave.core.kernels.KernelException;
import cleave.core.kernels.KernelLostException;
import cleave.core.kernels.Matrix;
import cleave.core.kernels.Product;
import java.nio.ByteBuffer;
import java.util.IdentityHashMap;
import java.util.Map;
import java.util.concurrent.Executor;
import java.util.function.BooleanSupplier;
import java.util.function.LongSupplier;

/**
 * One session's use of a kernel: everything happens in the kernel's own thread, in order. What
 * cannot be computed, for whatever reason, is told, and harms nothing else.
 */
final class KernelThread {
    private static final double NANOS_PER_S = 1e9;

    /** Learns what became of a product. */
    interface Answer {
        void computed(ByteBuffer payload, double computeS);

        void failed(String reason);

        /** The kernel is of no more use. */
        void lost(String reason);
    }

    private final Kernel kernel;
    private final Executor thread;
    private final LongSupplier nanos;
    private final Map<Matrix, String> refused = new IdentityHashMap<>(); // by the kernel, and why

    /** @param thread the one in which the kernel was made */
    KernelThread(Kernel kernel, Executor thread, LongSupplier nanos) {
        this.kernel = kernel;
        this.thread = thread;
        this.nanos = nanos;
    }

    void hold(Matrix matrix) {
        thread.execute(
                () -> {
                    try {
                        kernel.hold(matrix);
                    } catch (KernelException | RuntimeException | OutOfMemoryError error) {
                        refused.put(matrix, text(error)); // told when a run names it
                    }
                });
    }

    void forget(Matrix matrix) {
        thread.execute(
                () -> {
                    if (refused.remove(matrix) == null) {
                        kernel.forget(matrix);
                    }
                });
    }

    /** @param wanted asked before the arithmetic begins; if not, nothing is answered */
    void multiply(Product product, BooleanSupplier wanted, Answer answer) {
        thread.execute(
                () -> {
                    if (wanted.getAsBoolean()) {
                        multiply(product, answer);
                    }
                });
    }

    private void multiply(Product product, Answer answer) {
        for (Product.Pair pair : product.pairs) {
            String reason = refused.containsKey(pair.a) ? refused.get(pair.a) : refused.get(pair.b);
            if (reason != null) {
                answer.failed(reason);
                return;
            }
        }
        ByteBuffer payload;
        double computeS;
        try {
            long began = nanos.getAsLong();
            payload = kernel.multiply(product);
            computeS = (nanos.getAsLong() - began) / NANOS_PER_S;
        } catch (KernelLostException error) {
            answer.lost(text(error));
            return;
        } catch (KernelException | RuntimeException | OutOfMemoryError error) {
            answer.failed(text(error));
            return;
        }
        if (payload.remaining() == product.resultBytes()) {
            answer.computed(payload, computeS);
        } else {
            answer.failed("the kernel gave a result of another size");
        }
    }

    private static String text(Throwable error) {
        if (error instanceof OutOfMemoryError) {
            return "not enough memory";
        }
        return error instanceof KernelException ? error.getMessage() : error.toString();
    }
}
