package android.opengl;

import com.sun.jna.Memory;
import com.sun.jna.Native;
import com.sun.jna.Pointer;

/** For tests, like {@link GLES20}; attributes are given without offset. */
public class EGL14 {
    public static final int EGL_CONTEXT_CLIENT_VERSION = 0x3098;
    public static final int EGL_DEFAULT_DISPLAY = 0;
    public static final int EGL_HEIGHT = 0x3056;
    public static final int EGL_NONE = 0x3038;
    public static final int EGL_PBUFFER_BIT = 0x0001;
    public static final int EGL_RENDERABLE_TYPE = 0x3040;
    public static final int EGL_SURFACE_TYPE = 0x3033;
    public static final int EGL_WIDTH = 0x3057;
    public static final EGLContext EGL_NO_CONTEXT = new EGLContext(Pointer.NULL);
    public static final EGLSurface EGL_NO_SURFACE = new EGLSurface(Pointer.NULL);

    public static boolean eglChooseConfig(
            EGLDisplay dpy,
            int[] attributes,
            int attributesOffset,
            EGLConfig[] configs,
            int configsOffset,
            int size,
            int[] count,
            int countOffset) {
        Memory found = new Memory((long) size * Native.POINTER_SIZE);
        int[] many = new int[1];
        boolean ok = C.eglChooseConfig(dpy.pointer, attributes, found, size, many) != 0;
        for (int i = 0; ok && i < many[0]; i++) {
            Pointer config = found.getPointer((long) i * Native.POINTER_SIZE);
            configs[configsOffset + i] = new EGLConfig(config);
        }
        count[countOffset] = many[0];
        return ok;
    }

    public static EGLContext eglCreateContext(
            EGLDisplay dpy, EGLConfig config, EGLContext share, int[] attributes, int offset) {
        return new EGLContext(
                C.eglCreateContext(dpy.pointer, config.pointer, share.pointer, attributes));
    }

    public static EGLSurface eglCreatePbufferSurface(
            EGLDisplay dpy, EGLConfig config, int[] attributes, int offset) {
        return new EGLSurface(C.eglCreatePbufferSurface(dpy.pointer, config.pointer, attributes));
    }

    public static boolean eglDestroyContext(EGLDisplay dpy, EGLContext context) {
        return C.eglDestroyContext(dpy.pointer, context.pointer) != 0;
    }

    public static boolean eglDestroySurface(EGLDisplay dpy, EGLSurface surface) {
        return C.eglDestroySurface(dpy.pointer, surface.pointer) != 0;
    }

    public static EGLDisplay eglGetDisplay(int id) {
        return new EGLDisplay(C.eglGetDisplay(new Pointer(id)));
    }

    public static int eglGetError() {
        return C.eglGetError();
    }

    public static boolean eglInitialize(
            EGLDisplay dpy, int[] major, int majorOffset, int[] minor, int minorOffset) {
        int[] found = new int[1];
        int[] foundMinor = new int[1];
        boolean ok = C.eglInitialize(dpy.pointer, found, foundMinor) != 0;
        major[majorOffset] = found[0];
        minor[minorOffset] = foundMinor[0];
        return ok;
    }

    public static boolean eglMakeCurrent(
            EGLDisplay dpy, EGLSurface draw, EGLSurface read, EGLContext context) {
        return C.eglMakeCurrent(dpy.pointer, draw.pointer, read.pointer, context.pointer) != 0;
    }

    public static boolean eglReleaseThread() {
        return C.eglReleaseThread() != 0;
    }

    public static boolean eglTerminate(EGLDisplay dpy) {
        return C.eglTerminate(dpy.pointer) != 0;
    }

    private static final class C {
        static {
            Native.register(C.class, "EGL");
        }

        static native int eglChooseConfig(
                Pointer dpy, int[] attributes, Pointer configs, int size, int[] count);

        static native Pointer eglCreateContext(
                Pointer dpy, Pointer config, Pointer share, int[] attributes);

        static native Pointer eglCreatePbufferSurface(
                Pointer dpy, Pointer config, int[] attributes);

        static native int eglDestroyContext(Pointer dpy, Pointer context);

        static native int eglDestroySurface(Pointer dpy, Pointer surface);

        static native Pointer eglGetDisplay(Pointer id);

        static native int eglGetError();

        static native int eglInitialize(Pointer dpy, int[] major, int[] minor);

        static native int eglMakeCurrent(Pointer dpy, Pointer draw, Pointer read, Pointer context);

        static native int eglReleaseThread();

        static native int eglTerminate(Pointer dpy);
    }
}
