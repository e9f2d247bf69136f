package android.opengl;

import com.sun.jna.Native;

/** For tests, like {@link GLES20}. */
public class GLES31 extends GLES30 {
    public static final int GL_BUFFER_UPDATE_BARRIER_BIT = 0x00000200;
    public static final int GL_COMPUTE_SHADER = 0x91B9;
    public static final int GL_MAX_SHADER_STORAGE_BLOCK_SIZE = 0x90DE;
    public static final int GL_SHADER_STORAGE_BARRIER_BIT = 0x00002000;
    public static final int GL_SHADER_STORAGE_BUFFER = 0x90D2;

    public static void glDispatchCompute(int x, int y, int z) {
        C.glDispatchCompute(x, y, z);
    }

    public static void glMemoryBarrier(int barriers) {
        C.glMemoryBarrier(barriers);
    }

    private static final class C {
        static {
            Native.register(C.class, "GLESv2");
        }

        static native void glDispatchCompute(int x, int y, int z);

        static native void glMemoryBarrier(int barriers);
    }
}
