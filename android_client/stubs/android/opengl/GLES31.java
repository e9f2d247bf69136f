package android.opengl;

import stub.Unknown;

public class GLES31 extends GLES30 {
    public static final int GL_BUFFER_UPDATE_BARRIER_BIT = Unknown.INT;
    public static final int GL_COMPUTE_SHADER = Unknown.INT;
    public static final int GL_MAX_SHADER_STORAGE_BLOCK_SIZE = Unknown.INT;
    public static final int GL_SHADER_STORAGE_BARRIER_BIT = Unknown.INT;
    public static final int GL_SHADER_STORAGE_BUFFER = Unknown.INT;

    GLES31() {}

    public static void glDispatchCompute(int num_groups_x, int num_groups_y, int num_groups_z) {
        throw Unknown.body();
    }

    public static void glMemoryBarrier(int barriers) {
        throw Unknown.body();
    }
}
