package cleave.gpu;

import android.opengl.GLES31;
import cleave.core.kernels.DType;
import cleave.core.kernels.KernelException;

/**
 * The compute shader for inputs of one dtype.
 *
 * <p>A group of 16 by 8 threads computes 32 rows and 64 columns of the result, 4 by 4 elements
 * each. 16 deep at a time, it first brings both parts into shared memory, widened to fp32, with
 * zeros beyond the edges. 128 threads and 6 KiB are within what every OpenGL ES 3.1 has.
 */
final class MultiplyProgram {
    private static final int GROUP_ROWS = 32;
    private static final int GROUP_COLUMNS = 64;

    private static final String BODY =
            "precision highp float;\n"
                    + "precision highp int;\n"
                    + "layout(local_size_x = 16, local_size_y = 8) in;\n"
                    + "layout(std430, binding = 0) readonly buffer Left { ELEMENT a[]; };\n"
                    + "layout(std430, binding = 1) readonly buffer Right { ELEMENT b[]; };\n"
                    + "layout(std430, binding = 2) buffer Result { float c[]; };\n"
                    + "uniform ivec4 shape;\n" // rows, columns, depth, first row
                    + "uniform ivec4 strides;\n" // a: row, depth; b: depth, column
                    + "uniform int adds;\n" // whether to add to what is there
                    + "const int ROWS = 32;\n"
                    + "const int COLUMNS = 64;\n"
                    + "const int DEPTH = 16;\n"
                    + "const int THREADS = 128;\n"
                    + "shared float left[DEPTH * ROWS];\n"
                    + "shared float right[DEPTH * COLUMNS];\n"
                    + "void main() {\n"
                    + "  int thread = int(gl_LocalInvocationIndex);\n"
                    + "  int x = int(gl_LocalInvocationID.x);\n"
                    + "  int y = int(gl_LocalInvocationID.y);\n"
                    + "  int row0 = shape.w + int(gl_WorkGroupID.y) * ROWS;\n"
                    + "  int column0 = int(gl_WorkGroupID.x) * COLUMNS;\n"
                    + "  float sums[16];\n"
                    + "  for (int i = 0; i < 16; i++) sums[i] = 0.0;\n"
                    + "  for (int k0 = 0; k0 < shape.z; k0 += DEPTH) {\n"
                    // Neighbouring threads read what lies side by side.
                    + "    for (int i = thread; i < DEPTH * ROWS; i += THREADS) {\n"
                    + "      int row = strides.y == 1 ? i / DEPTH : i % ROWS;\n"
                    + "      int k = strides.y == 1 ? i % DEPTH : i / ROWS;\n"
                    + "      bool inside = row0 + row < shape.x && k0 + k < shape.z;\n"
                    + "      int at = (row0 + row) * strides.x + (k0 + k) * strides.y;\n"
                    + "      left[k * ROWS + row] = inside ? A(at) : 0.0;\n"
                    + "    }\n"
                    + "    for (int i = thread; i < DEPTH * COLUMNS; i += THREADS) {\n"
                    + "      int column = strides.z == 1 ? i / DEPTH : i % COLUMNS;\n"
                    + "      int k = strides.z == 1 ? i % DEPTH : i / COLUMNS;\n"
                    + "      bool inside = column0 + column < shape.y && k0 + k < shape.z;\n"
                    + "      int at = (k0 + k) * strides.z + (column0 + column) * strides.w;\n"
                    + "      right[k * COLUMNS + column] = inside ? B(at) : 0.0;\n"
                    + "    }\n"
                    + "    memoryBarrierShared();\n"
                    + "    barrier();\n"
                    + "    for (int k = 0; k < DEPTH; k++) {\n"
                    + "      int l = k * ROWS + y;\n"
                    + "      int r = k * COLUMNS + x;\n"
                    + "      vec4 q = vec4(\n"
                    + "          right[r], right[r + 16], right[r + 32], right[r + 48]);\n"
                    + "      for (int i = 0; i < 4; i++) {\n"
                    + "        float p = left[l + 8 * i];\n"
                    + "        sums[4 * i] += p * q.x;\n"
                    + "        sums[4 * i + 1] += p * q.y;\n"
                    + "        sums[4 * i + 2] += p * q.z;\n"
                    + "        sums[4 * i + 3] += p * q.w;\n"
                    + "      }\n"
                    + "    }\n"
                    + "    barrier();\n"
                    + "  }\n"
                    + "  for (int i = 0; i < 4; i++) {\n"
                    + "    for (int j = 0; j < 4; j++) {\n"
                    + "      int row = row0 + y + 8 * i;\n"
                    + "      int column = column0 + x + 16 * j;\n"
                    + "      if (row < shape.x && column < shape.y) {\n"
                    + "        int at = row * shape.y + column;\n"
                    + "        c[at] = adds == 1 ? c[at] + sums[4 * i + j] : sums[4 * i + j];\n"
                    + "      }\n"
                    + "    }\n"
                    + "  }\n"
                    + "}\n";

    private final int program;
    private final int shape;
    private final int strides;
    private final int adds;

    /**
     * @throws KernelException when the driver does not compile it
     */
    MultiplyProgram(DType inputs) throws KernelException {
        program = GLES31.glCreateProgram();
        int shader = GLES31.glCreateShader(GLES31.GL_COMPUTE_SHADER);
        GLES31.glShaderSource(shader, source(inputs));
        GLES31.glCompileShader(shader);
        int[] compiled = new int[1];
        GLES31.glGetShaderiv(shader, GLES31.GL_COMPILE_STATUS, compiled, 0);
        if (compiled[0] == 0) {
            throw new KernelException(
                    "the GPU's driver does not compile the kernel: "
                            + GLES31.glGetShaderInfoLog(shader));
        }
        GLES31.glAttachShader(program, shader);
        GLES31.glLinkProgram(program);
        GLES31.glDeleteShader(shader);
        int[] linked = new int[1];
        GLES31.glGetProgramiv(program, GLES31.GL_LINK_STATUS, linked, 0);
        if (linked[0] == 0) {
            throw new KernelException(
                    "the GPU's driver does not link the kernel: "
                            + GLES31.glGetProgramInfoLog(program));
        }
        shape = GLES31.glGetUniformLocation(program, "shape");
        strides = GLES31.glGetUniformLocation(program, "strides");
        adds = GLES31.glGetUniformLocation(program, "adds");
    }

    /** Rows of the result that one row of groups computes. */
    static int groupRows() {
        return GROUP_ROWS;
    }

    /**
     * Starts computing some rows of a product. The buffers are bound to 0, 1 and 2.
     *
     * @param shapeOf rows, columns, depth of the whole product
     * @param stridesOf elements between: rows of a, columns of a; rows of b, columns of b
     * @param addsUp whether to add to what the result's buffer holds
     */
    void start(int[] shapeOf, int[] stridesOf, int firstRow, int rows, boolean addsUp) {
        GLES31.glUseProgram(program);
        GLES31.glUniform4i(shape, shapeOf[0], shapeOf[1], shapeOf[2], firstRow);
        GLES31.glUniform4i(strides, stridesOf[0], stridesOf[1], stridesOf[2], stridesOf[3]);
        GLES31.glUniform1i(adds, addsUp ? 1 : 0);
        GLES31.glDispatchCompute(
                groups(shapeOf[1], GROUP_COLUMNS), groups(rows, GROUP_ROWS), 1);
        GLES31.glMemoryBarrier(
                GLES31.GL_SHADER_STORAGE_BARRIER_BIT | GLES31.GL_BUFFER_UPDATE_BARRIER_BIT);
    }

    void close() {
        GLES31.glDeleteProgram(program);
    }

    private static int groups(int size, int each) {
        return (size + each - 1) / each;
    }

    /** 16-bit elements lie two to a word, the first in its lower half; widening them is exact. */
    private static String source(DType inputs) {
        if (inputs == DType.FP32) {
            return "#version 310 es\n"
                    + "#define ELEMENT float\n"
                    + "#define A(at) a[at]\n"
                    + "#define B(at) b[at]\n"
                    + BODY;
        }
        String widened =
                inputs == DType.BF16
                        ? "uintBitsToFloat(half16(word, at) << 16)"
                        : "unpackHalf2x16(half16(word, at)).x";
        return "#version 310 es\n"
                + "precision highp float;\n"
                + "precision highp int;\n"
                + "#define ELEMENT uint\n"
                + "uint half16(uint word, int at) {\n"
                + "  return (at & 1) == 1 ? word >> 16 : word & 0xffffu;\n"
                + "}\n"
                + "float widened(uint word, int at) { return " + widened + "; }\n"
                + "#define A(at) widened(a[(at) >> 1], at)\n"
                + "#define B(at) widened(b[(at) >> 1], at)\n"
                + BODY;
    }
}
