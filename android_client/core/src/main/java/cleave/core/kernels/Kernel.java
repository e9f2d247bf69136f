package cleave.core.kernels;

import java.nio.ByteBuffer;

/**
 * Multiplies matrices. All calls, from its making to {@code close}, come from one thread, one after
 * the other, so that a kernel may keep a graphics context in it; it may use further threads itself.
 */
public interface Kernel {
    /** A short word: {@code cpu}, {@code gpu}. */
    String name();

    /** For people: threads, the GPU's name. */
    String about();

    /**
     * A matrix that products to come will name, until {@code forget}. A kernel may copy it
     * elsewhere, or do nothing.
     *
     * @throws KernelException when there is no room for it; runs that name it are then answered by
     *     {@code task_error}
     */
    void hold(Matrix matrix) throws KernelException;

    /** No product that comes from now on names the matrix. It was held before. */
    void forget(Matrix matrix);

    /**
     * Compute a product of matrices that are held.
     *
     * @return the result's elements, row by row, little-endian, from position to limit; the
     *     caller's from now on
     * @throws KernelException when it cannot be computed; {@link KernelLostException} when the
     *     kernel is of no more use at all, as when a GPU is lost
     */
    ByteBuffer multiply(Product product) throws KernelException;

    /** Give everything back. */
    void close();
}
