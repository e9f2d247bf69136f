package android.opengl;

import com.sun.jna.Native;
import com.sun.jna.Pointer;
import java.nio.Buffer;

/** For tests, like {@link GLES20}. */
public class GLES30 extends GLES20 {
    public static final int GL_DYNAMIC_READ = 0x88E9;
    public static final int GL_MAJOR_VERSION = 0x821B;
    public static final int GL_MAP_READ_BIT = 0x0001;
    public static final int GL_MINOR_VERSION = 0x821C;

    public static void glBindBufferBase(int target, int index, int buffer) {
        C.glBindBufferBase(target, index, buffer);
    }

    public static Buffer glMapBufferRange(int target, int offset, int length, int access) {
        Pointer mapped = C.glMapBufferRange(target, offset, length, access);
        return mapped == null ? null : mapped.getByteBuffer(0, length);
    }

    public static boolean glUnmapBuffer(int target) {
        return C.glUnmapBuffer(target) != 0;
    }

    private static final class C {
        static {
            Native.register(C.class, "GLESv2");
        }

        static native void glBindBufferBase(int target, int index, int buffer);

        static native Pointer glMapBufferRange(int target, long offset, long length, int access);

        static native byte glUnmapBuffer(int target);
    }
}
