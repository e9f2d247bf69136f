package android.opengl;

import java.nio.Buffer;
import stub.Unknown;

public class GLES20 {
    public static final int GL_COMPILE_STATUS = Unknown.INT;
    public static final int GL_LINK_STATUS = Unknown.INT;
    public static final int GL_NO_ERROR = Unknown.INT;
    public static final int GL_OUT_OF_MEMORY = Unknown.INT;
    public static final int GL_RENDERER = Unknown.INT;
    public static final int GL_STATIC_DRAW = Unknown.INT;

    public static void glAttachShader(int program, int shader) {
        throw Unknown.body();
    }

    public static void glBindBuffer(int target, int buffer) {
        throw Unknown.body();
    }

    public static void glBufferData(int target, int size, Buffer data, int usage) {
        throw Unknown.body();
    }

    public static void glBufferSubData(int target, int offset, int size, Buffer data) {
        throw Unknown.body();
    }

    public static void glCompileShader(int shader) {
        throw Unknown.body();
    }

    public static int glCreateProgram() {
        throw Unknown.body();
    }

    public static int glCreateShader(int type) {
        throw Unknown.body();
    }

    public static void glDeleteBuffers(int n, int[] buffers, int offset) {
        throw Unknown.body();
    }

    public static void glDeleteProgram(int program) {
        throw Unknown.body();
    }

    public static void glDeleteShader(int shader) {
        throw Unknown.body();
    }

    public static void glFlush() {
        throw Unknown.body();
    }

    public static void glGenBuffers(int n, int[] buffers, int offset) {
        throw Unknown.body();
    }

    public static int glGetError() {
        throw Unknown.body();
    }

    public static void glGetIntegerv(int pname, int[] params, int offset) {
        throw Unknown.body();
    }

    public static String glGetProgramInfoLog(int program) {
        throw Unknown.body();
    }

    public static void glGetProgramiv(int program, int pname, int[] params, int offset) {
        throw Unknown.body();
    }

    public static String glGetShaderInfoLog(int shader) {
        throw Unknown.body();
    }

    public static void glGetShaderiv(int shader, int pname, int[] params, int offset) {
        throw Unknown.body();
    }

    public static String glGetString(int name) {
        throw Unknown.body();
    }

    public static int glGetUniformLocation(int program, String name) {
        throw Unknown.body();
    }

    public static void glLinkProgram(int program) {
        throw Unknown.body();
    }

    public static void glShaderSource(int shader, String string) {
        throw Unknown.body();
    }

    public static void glUniform1i(int location, int x) {
        throw Unknown.body();
    }

    public static void glUniform4i(int location, int x, int y, int z, int w) {
        throw Unknown.body();
    }

    public static void glUseProgram(int program) {
        throw Unknown.body();
    }
}
