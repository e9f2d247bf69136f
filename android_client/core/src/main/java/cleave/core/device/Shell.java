package cleave.core.device;

import cleave.core.graphs.GraphWork;
import cleave.core.kernels.Matrix;
import cleave.core.kernels.Product;
import cleave.core.protocol.Message;

/** What does what a device core decides. */
public interface Shell {
    /** Send a message to the server. */
    void send(Message message);

    /** Keep a matrix for products to come. */
    void hold(Matrix matrix);

    /** No product that is asked for from now on names the matrix. */
    void forget(Matrix matrix);

    /** What does graphs; called only where they are part of the session. */
    GraphWork graphs();

    /** Compute, then tell the core {@code computed} or {@code failed}. */
    void compute(long run, Product product);
}
