package cleave.core.kernels;

/** A kernel is of no more use at all, as when a GPU is lost. */
public class KernelLostException extends KernelException {
    private static final long serialVersionUID = 1;

    public KernelLostException(String reason) {
        super(reason);
    }
}
