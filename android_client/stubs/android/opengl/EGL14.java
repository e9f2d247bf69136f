package android.opengl;

import stub.Unknown;

public class EGL14 {
    public static final int EGL_CONTEXT_CLIENT_VERSION = Unknown.INT;
    public static final int EGL_DEFAULT_DISPLAY = Unknown.INT;
    public static final int EGL_HEIGHT = Unknown.INT;
    public static final int EGL_NONE = Unknown.INT;
    public static final int EGL_PBUFFER_BIT = Unknown.INT;
    public static final int EGL_RENDERABLE_TYPE = Unknown.INT;
    public static final int EGL_SURFACE_TYPE = Unknown.INT;
    public static final int EGL_WIDTH = Unknown.INT;
    public static final EGLContext EGL_NO_CONTEXT = null;
    public static final EGLSurface EGL_NO_SURFACE = null;

    public static boolean eglChooseConfig(
            EGLDisplay dpy,
            int[] attrib_list,
            int attrib_listOffset,
            EGLConfig[] configs,
            int configsOffset,
            int config_size,
            int[] num_config,
            int num_configOffset) {
        throw Unknown.body();
    }

    public static EGLContext eglCreateContext(
            EGLDisplay dpy, EGLConfig config, EGLContext share, int[] attrib_list, int offset) {
        throw Unknown.body();
    }

    public static EGLSurface eglCreatePbufferSurface(
            EGLDisplay dpy, EGLConfig config, int[] attrib_list, int offset) {
        throw Unknown.body();
    }

    public static boolean eglDestroyContext(EGLDisplay dpy, EGLContext ctx) {
        throw Unknown.body();
    }

    public static boolean eglDestroySurface(EGLDisplay dpy, EGLSurface surface) {
        throw Unknown.body();
    }

    public static EGLDisplay eglGetDisplay(int display_id) {
        throw Unknown.body();
    }

    public static int eglGetError() {
        throw Unknown.body();
    }

    public static boolean eglInitialize(
            EGLDisplay dpy, int[] major, int majorOffset, int[] minor, int minorOffset) {
        throw Unknown.body();
    }

    public static boolean eglMakeCurrent(
            EGLDisplay dpy, EGLSurface draw, EGLSurface read, EGLContext ctx) {
        throw Unknown.body();
    }

    public static boolean eglReleaseThread() {
        throw Unknown.body();
    }

    public static boolean eglTerminate(EGLDisplay dpy) {
        throw Unknown.body();
    }
}
