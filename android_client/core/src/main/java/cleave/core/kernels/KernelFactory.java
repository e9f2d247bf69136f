package cleave.core.kernels;

/** Makes one kind of kernel. */
public interface KernelFactory {
    /** What {@link Kernel#name} of the kernels is. */
    String name();

    /**
     * A new kernel, made in the thread that will use it.
     *
     * @throws KernelException when this device does not have it
     */
    Kernel make() throws KernelException;
}
