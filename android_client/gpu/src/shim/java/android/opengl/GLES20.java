package android.opengl;

import com.sun.jna.Memory;
import com.sun.jna.Native;
import com.sun.jna.Pointer;
import java.nio.Buffer;
import java.nio.IntBuffer;
import java.nio.charset.StandardCharsets;

/** For tests: what the kernel uses of Android's class, on top of the system's OpenGL ES. */
public class GLES20 {
    public static final int GL_COMPILE_STATUS = 0x8B81;
    public static final int GL_LINK_STATUS = 0x8B82;
    public static final int GL_NO_ERROR = 0;
    public static final int GL_OUT_OF_MEMORY = 0x0505;
    public static final int GL_RENDERER = 0x1F01;
    public static final int GL_STATIC_DRAW = 0x88E4;

    private static final int INFO_BYTES = 4096;

    public static void glAttachShader(int program, int shader) {
        C.glAttachShader(program, shader);
    }

    public static void glBindBuffer(int target, int buffer) {
        C.glBindBuffer(target, buffer);
    }

    public static void glBufferData(int target, int size, Buffer data, int usage) {
        Pointer from = data == null ? null : Native.getDirectBufferPointer(data);
        C.glBufferData(target, size, from, usage);
    }

    public static void glBufferSubData(int target, int offset, int size, Buffer data) {
        C.glBufferSubData(target, offset, size, Native.getDirectBufferPointer(data));
    }

    public static void glCompileShader(int shader) {
        C.glCompileShader(shader);
    }

    public static int glCreateProgram() {
        return C.glCreateProgram();
    }

    public static int glCreateShader(int type) {
        return C.glCreateShader(type);
    }

    public static void glDeleteBuffers(int n, int[] buffers, int offset) {
        C.glDeleteBuffers(n, IntBuffer.wrap(buffers, offset, n).slice());
    }

    public static void glDeleteProgram(int program) {
        C.glDeleteProgram(program);
    }

    public static void glDeleteShader(int shader) {
        C.glDeleteShader(shader);
    }

    public static void glFlush() {
        C.glFlush();
    }

    public static void glGenBuffers(int n, int[] buffers, int offset) {
        int[] names = new int[n];
        C.glGenBuffers(n, names);
        System.arraycopy(names, 0, buffers, offset, n);
    }

    public static int glGetError() {
        return C.glGetError();
    }

    public static void glGetIntegerv(int pname, int[] params, int offset) {
        int[] found = new int[16];
        C.glGetIntegerv(pname, found);
        params[offset] = found[0];
    }

    public static String glGetProgramInfoLog(int program) {
        Memory text = new Memory(INFO_BYTES);
        C.glGetProgramInfoLog(program, INFO_BYTES, null, text);
        return text.getString(0);
    }

    public static void glGetProgramiv(int program, int pname, int[] params, int offset) {
        int[] found = new int[1];
        C.glGetProgramiv(program, pname, found);
        params[offset] = found[0];
    }

    public static String glGetShaderInfoLog(int shader) {
        Memory text = new Memory(INFO_BYTES);
        C.glGetShaderInfoLog(shader, INFO_BYTES, null, text);
        return text.getString(0);
    }

    public static void glGetShaderiv(int shader, int pname, int[] params, int offset) {
        int[] found = new int[1];
        C.glGetShaderiv(shader, pname, found);
        params[offset] = found[0];
    }

    public static String glGetString(int name) {
        return C.glGetString(name).getString(0);
    }

    public static int glGetUniformLocation(int program, String name) {
        return C.glGetUniformLocation(program, name);
    }

    public static void glLinkProgram(int program) {
        C.glLinkProgram(program);
    }

    public static void glShaderSource(int shader, String string) {
        byte[] bytes = string.getBytes(StandardCharsets.UTF_8);
        Memory text = new Memory(bytes.length);
        text.write(0, bytes, 0, bytes.length);
        Memory texts = new Memory(Native.POINTER_SIZE);
        texts.setPointer(0, text);
        C.glShaderSource(shader, 1, texts, new int[] {bytes.length});
    }

    public static void glUniform1i(int location, int x) {
        C.glUniform1i(location, x);
    }

    public static void glUniform4i(int location, int x, int y, int z, int w) {
        C.glUniform4i(location, x, y, z, w);
    }

    public static void glUseProgram(int program) {
        C.glUseProgram(program);
    }

    private static final class C {
        static {
            Native.register(C.class, "GLESv2");
        }

        static native void glAttachShader(int program, int shader);

        static native void glBindBuffer(int target, int buffer);

        static native void glBufferData(int target, long size, Pointer data, int usage);

        static native void glBufferSubData(int target, long offset, long size, Pointer data);

        static native void glCompileShader(int shader);

        static native int glCreateProgram();

        static native int glCreateShader(int type);

        static native void glDeleteBuffers(int n, IntBuffer buffers);

        static native void glDeleteProgram(int program);

        static native void glDeleteShader(int shader);

        static native void glFlush();

        static native void glGenBuffers(int n, int[] buffers);

        static native int glGetError();

        static native void glGetIntegerv(int pname, int[] params);

        static native void glGetProgramInfoLog(int program, int size, Pointer length, Pointer text);

        static native void glGetProgramiv(int program, int pname, int[] params);

        static native void glGetShaderInfoLog(int shader, int size, Pointer length, Pointer text);

        static native void glGetShaderiv(int shader, int pname, int[] params);

        static native Pointer glGetString(int name);

        static native int glGetUniformLocation(int program, String name);

        static native void glLinkProgram(int program);

        static native void glShaderSource(int shader, int count, Pointer texts, int[] lengths);

        static native void glUniform1i(int location, int x);

        static native void glUniform4i(int location, int x, int y, int z, int w);

        static native void glUseProgram(int program);
    }
}
