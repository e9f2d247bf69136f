package android.opengl;

import java.nio.Buffer;
import stub.Unknown;

public class GLES30 extends GLES20 {
    public static final int GL_DYNAMIC_READ = Unknown.INT;
    public static final int GL_MAJOR_VERSION = Unknown.INT;
    public static final int GL_MAP_READ_BIT = Unknown.INT;
    public static final int GL_MINOR_VERSION = Unknown.INT;

    public static void glBindBufferBase(int target, int index, int buffer) {
        throw Unknown.body();
    }

    public static Buffer glMapBufferRange(int target, int offset, int length, int access) {
        throw Unknown.body();
    }

    public static boolean glUnmapBuffer(int target) {
        throw Unknown.body();
    }
}
