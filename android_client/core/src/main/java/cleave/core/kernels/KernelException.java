package cleave.core.kernels;

/** A kernel cannot do what it was asked; the text says why. */
public class KernelException extends Exception {
    private static final long serialVersionUID = 1;

    public KernelException(String reason) {
        super(reason);
    }
}
