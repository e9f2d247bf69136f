package cleave.core.kernels;

/** A kernel that passed its self-check, and how fast it was. */
public final class Chosen {
    public final Kernel kernel;

    /** Of large fp32 products. */
    public final double flopsPerS;

    Chosen(Kernel kernel, double flopsPerS) {
        this.kernel = kernel;
        this.flopsPerS = flopsPerS;
    }
}
