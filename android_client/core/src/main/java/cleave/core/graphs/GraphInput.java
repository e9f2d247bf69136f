package cleave.core.graphs;

import java.util.Arrays;

/** An input of a graph. */
public final class GraphInput {
    public final String name;
    private final long[] shape;

    /** @param shape its sizes; a negative one is the batch's, which may be any */
    public GraphInput(String name, long[] shape) {
        this.name = name;
        this.shape = shape.clone();
    }

    /**
     * Its shape with so many elements in it.
     *
     * @throws GraphException when it has no such shape
     */
    long[] shapeOf(long items) throws GraphException {
        long fixed = fixed();
        long free = free();
        long batch = free == 0 ? 1 : fixed == 0 ? -1 : items / fixed;
        if (free > 1 || batch < 0 || batch * fixed != items) {
            throw new GraphException(
                    "the input " + name + " has the shape " + Arrays.toString(shape) + ", and "
                            + items + " elements came");
        }
        long[] found = shape.clone();
        for (int i = 0; i < found.length; i++) {
            found[i] = found[i] < 0 ? batch : found[i];
        }
        return found;
    }

    /**
     * Its shape, of which nothing is open.
     *
     * @throws GraphException when something is
     */
    long[] fixedShape() throws GraphException {
        if (free() > 0) {
            throw new GraphException(
                    "the input " + name + " cannot be zeros: its shape is "
                            + Arrays.toString(shape));
        }
        return shape.clone();
    }

    private long free() {
        return Arrays.stream(shape).filter(size -> size < 0).count();
    }

    /** The product of all sizes that are not open. */
    long fixed() throws GraphException {
        long items = 1;
        try {
            for (long size : shape) {
                items = size < 0 ? items : Math.multiplyExact(items, size);
            }
        } catch (ArithmeticException error) {
            throw new GraphException("the input " + name + " is larger than any array");
        }
        return items;
    }
}
