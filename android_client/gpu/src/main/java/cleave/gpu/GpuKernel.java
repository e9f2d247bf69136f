package cleave.gpu;

import android.opengl.GLES31;
import cleave.core.kernels.DType;
import cleave.core.kernels.Kernel;
import cleave.core.kernels.KernelException;
import cleave.core.kernels.KernelFactory;
import cleave.core.kernels.KernelLostException;
import cleave.core.kernels.Matrix;
import cleave.core.kernels.Numbers;
import cleave.core.kernels.Product;
import java.nio.Buffer;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.EnumMap;
import java.util.IdentityHashMap;
import java.util.Map;

/**
 * Multiplies on the GPU with compute shaders of OpenGL ES 3.1: fp32 sums, 16-bit inputs widened
 * exactly. Matrices lie in its memory from {@code hold} to {@code forget}.
 */
public final class GpuKernel implements Kernel {
    /** What one call of the driver computes at most: a GPU that is busy for long is reset. */
    private static final double MOST_FLOPS_AT_ONCE = 1e9;

    private final GpuContext context;
    private final long mostBytes;
    private final Map<DType, MultiplyProgram> programs = new EnumMap<>(DType.class);
    private final Map<Matrix, Integer> buffers = new IdentityHashMap<>();
    private int result; // a buffer
    private int resultBytes; // its size

    private GpuKernel(GpuContext context) throws KernelException {
        this.context = context;
        int[] most = new int[1];
        GLES31.glGetIntegerv(GLES31.GL_MAX_SHADER_STORAGE_BLOCK_SIZE, most, 0);
        this.mostBytes = most[0];
        for (DType dtype : DType.values()) {
            programs.put(dtype, new MultiplyProgram(dtype));
        }
        this.result = newBuffer();
        check("it starts");
    }

    /** Makes the kernel, where there is OpenGL ES 3.1. */
    public static KernelFactory factory() {
        return new KernelFactory() {
            @Override
            public String name() {
                return "gpu";
            }

            @Override
            public Kernel make() throws KernelException {
                GpuContext context = GpuContext.make();
                try {
                    return new GpuKernel(context);
                } catch (KernelException error) {
                    context.close();
                    throw error;
                }
            }
        };
    }

    @Override
    public String name() {
        return "gpu";
    }

    @Override
    public String about() {
        return context.about();
    }

    @Override
    public void hold(Matrix matrix) throws KernelException {
        int bytes = matrix.payloadBytes();
        if (bytes == 0) {
            return;
        }
        int buffer = newBuffer();
        try {
            allocate(buffer, whole(bytes), GLES31.GL_STATIC_DRAW);
            GLES31.glBufferSubData(
                    GLES31.GL_SHADER_STORAGE_BUFFER, 0, bytes, direct(matrix.payload()));
            check("a matrix is copied to the GPU");
        } catch (KernelException error) {
            delete(buffer);
            throw error;
        }
        buffers.put(matrix, buffer);
    }

    @Override
    public void forget(Matrix matrix) {
        Integer buffer = buffers.remove(matrix);
        if (buffer != null) {
            delete(buffer);
        }
    }

    @Override
    public ByteBuffer multiply(Product product) throws KernelException {
        int elements = (int) (product.rows * product.columns);
        float[] sums = new float[elements];
        if (elements > 0 && product.flops() > 0) {
            makeRoom(4 * elements);
            GLES31.glBindBufferBase(GLES31.GL_SHADER_STORAGE_BUFFER, 2, result);
            boolean adds = false;
            for (Product.Pair pair : product.pairs) {
                if (product.depth(pair) > 0) {
                    start(product, pair, adds);
                    adds = true;
                }
            }
            read(sums);
        }
        return Numbers.narrowed(sums, product.out);
    }

    @Override
    public void close() {
        for (int buffer : buffers.values()) {
            delete(buffer);
        }
        buffers.clear();
        delete(result);
        for (MultiplyProgram program : programs.values()) {
            program.close();
        }
        context.close();
    }

    private void start(Product product, Product.Pair pair, boolean adds) throws KernelException {
        int rows = (int) product.rows;
        int columns = (int) product.columns;
        int depth = (int) product.depth(pair);
        int[] shape = {rows, columns, depth};
        int[] strides = {
            product.transposeA ? 1 : depth, product.transposeA ? rows : 1,
            product.transposeB ? 1 : columns, product.transposeB ? depth : 1
        };
        GLES31.glBindBufferBase(GLES31.GL_SHADER_STORAGE_BUFFER, 0, bufferOf(pair.a));
        GLES31.glBindBufferBase(GLES31.GL_SHADER_STORAGE_BUFFER, 1, bufferOf(pair.b));
        MultiplyProgram program = programs.get(product.inputs());
        int group = MultiplyProgram.groupRows();
        double flopsOfGroup = 2.0 * group * columns * depth;
        int band = group * (int) Math.max(1, Math.min(rows, MOST_FLOPS_AT_ONCE / flopsOfGroup));
        for (int row = 0; row < rows; row += band) {
            program.start(shape, strides, row, Math.min(band, rows - row), adds);
            GLES31.glFlush();
        }
    }

    private int bufferOf(Matrix matrix) throws KernelException {
        Integer buffer = buffers.get(matrix);
        if (buffer == null) {
            throw new KernelException("the GPU does not hold a matrix of the product");
        }
        return buffer;
    }

    /** Waits for the result, and copies it from the GPU. */
    private void read(float[] sums) throws KernelException {
        GLES31.glBindBuffer(GLES31.GL_SHADER_STORAGE_BUFFER, result);
        Buffer mapped =
                GLES31.glMapBufferRange(
                        GLES31.GL_SHADER_STORAGE_BUFFER,
                        0,
                        4 * sums.length,
                        GLES31.GL_MAP_READ_BIT);
        if (mapped == null) {
            check("a result is read");
            throw new KernelLostException("the GPU's driver does not give a result back");
        }
        ((ByteBuffer) mapped).order(ByteOrder.nativeOrder()).asFloatBuffer().get(sums);
        if (!GLES31.glUnmapBuffer(GLES31.GL_SHADER_STORAGE_BUFFER)) {
            throw new KernelLostException("the GPU lost its memory");
        }
        check("a product is computed");
    }

    private void makeRoom(int bytes) throws KernelException {
        if (bytes > resultBytes) {
            resultBytes = 0;
            allocate(result, bytes, GLES31.GL_DYNAMIC_READ);
            resultBytes = bytes;
        }
    }

    private void allocate(int buffer, int bytes, int use) throws KernelException {
        if (bytes > mostBytes) {
            throw new KernelException(
                    "the GPU takes matrices of " + mostBytes + " bytes at most, not " + bytes);
        }
        GLES31.glBindBuffer(GLES31.GL_SHADER_STORAGE_BUFFER, buffer);
        GLES31.glBufferData(GLES31.GL_SHADER_STORAGE_BUFFER, bytes, null, use);
        check("memory is taken");
    }

    private static int newBuffer() {
        int[] name = new int[1];
        GLES31.glGenBuffers(1, name, 0);
        return name[0];
    }

    private static void delete(int buffer) {
        GLES31.glDeleteBuffers(1, new int[] {buffer}, 0);
    }

    /** 16-bit elements are read two at a time. */
    private static int whole(int bytes) {
        return (bytes + 3) / 4 * 4;
    }

    private static ByteBuffer direct(ByteBuffer payload) {
        ByteBuffer copy = ByteBuffer.allocateDirect(payload.remaining());
        copy.put(payload);
        copy.flip();
        return copy;
    }

    private static void check(String when) throws KernelException {
        int error = GLES31.glGetError();
        if (error == GLES31.GL_OUT_OF_MEMORY) {
            throw new KernelException("the GPU has not enough memory left");
        }
        if (error != GLES31.GL_NO_ERROR) {
            throw new KernelLostException(
                    "OpenGL reports 0x" + Integer.toHexString(error) + " when " + when);
        }
    }
}
