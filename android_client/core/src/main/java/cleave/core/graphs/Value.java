package cleave.core.graphs;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;

/** An array as graphs take it. */
public final class Value {
    public final ElementType type;
    private final long[] shape;
    private final ByteBuffer data;

    /** @param data its elements from position to limit, in a direct buffer; not copied */
    public Value(ElementType type, long[] shape, ByteBuffer data) {
        if (!data.isDirect()) {
            throw new IllegalArgumentException("elements of graphs are in direct buffers");
        }
        this.type = type;
        this.shape = shape.clone();
        this.data = data;
    }

    public long[] shape() {
        return shape.clone();
    }

    /** A view of its elements: little-endian, from position to limit. */
    public ByteBuffer data() {
        return data.duplicate().order(ByteOrder.LITTLE_ENDIAN);
    }

    /** How many elements it has. */
    public int items() {
        return data.remaining() / type.itemBytes;
    }

    /** The same elements in another shape. */
    Value shaped(long[] as) {
        return new Value(type, as, data);
    }
}
