package cleave.gpu;

import android.opengl.EGL14;
import android.opengl.EGLConfig;
import android.opengl.EGLContext;
import android.opengl.EGLDisplay;
import android.opengl.EGLExt;
import android.opengl.EGLSurface;
import android.opengl.GLES31;
import cleave.core.kernels.KernelException;

/** An OpenGL ES 3.1 context that shows nothing, current in the thread that made it. */
final class GpuContext {
    private final EGLDisplay display;
    private final EGLContext context;
    private final EGLSurface surface;

    private GpuContext(EGLDisplay display, EGLContext context, EGLSurface surface) {
        this.display = display;
        this.context = context;
        this.surface = surface;
    }

    /**
     * @throws KernelException when there is no OpenGL ES 3.1 here
     */
    static GpuContext make() throws KernelException {
        EGLDisplay display = EGL14.eglGetDisplay(EGL14.EGL_DEFAULT_DISPLAY);
        int[] version = new int[2];
        if (!EGL14.eglInitialize(display, version, 0, version, 1)) {
            throw new KernelException("EGL does not start (" + eglError() + ")");
        }
        GpuContext made = null;
        try {
            EGLConfig config = configOf(display);
            int[] es3 = {EGL14.EGL_CONTEXT_CLIENT_VERSION, 3, EGL14.EGL_NONE};
            EGLContext context =
                    EGL14.eglCreateContext(display, config, EGL14.EGL_NO_CONTEXT, es3, 0);
            int[] onePixel = {EGL14.EGL_WIDTH, 1, EGL14.EGL_HEIGHT, 1, EGL14.EGL_NONE};
            EGLSurface surface = EGL14.eglCreatePbufferSurface(display, config, onePixel, 0);
            made = new GpuContext(display, context, surface);
            if (!EGL14.eglMakeCurrent(display, surface, surface, context)) {
                throw new KernelException("there is no OpenGL ES 3 context (" + eglError() + ")");
            }
            checkVersion();
            return made;
        } catch (KernelException error) {
            if (made != null) {
                made.close();
            } else {
                EGL14.eglTerminate(display);
            }
            throw error;
        }
    }

    /** What it is called by its driver. */
    String about() {
        return GLES31.glGetString(GLES31.GL_RENDERER);
    }

    void close() {
        EGL14.eglMakeCurrent(
                display, EGL14.EGL_NO_SURFACE, EGL14.EGL_NO_SURFACE, EGL14.EGL_NO_CONTEXT);
        EGL14.eglDestroySurface(display, surface);
        EGL14.eglDestroyContext(display, context);
        EGL14.eglReleaseThread();
        EGL14.eglTerminate(display);
    }

    private static EGLConfig configOf(EGLDisplay display) throws KernelException {
        int[] wanted = {
            EGL14.EGL_RENDERABLE_TYPE, EGLExt.EGL_OPENGL_ES3_BIT_KHR,
            EGL14.EGL_SURFACE_TYPE, EGL14.EGL_PBUFFER_BIT,
            EGL14.EGL_NONE
        };
        EGLConfig[] configs = new EGLConfig[1];
        int[] count = new int[1];
        boolean asked =
                EGL14.eglChooseConfig(display, wanted, 0, configs, 0, configs.length, count, 0);
        if (!asked || count[0] == 0) {
            throw new KernelException("EGL has no configuration for OpenGL ES 3");
        }
        return configs[0];
    }

    private static void checkVersion() throws KernelException {
        int[] major = new int[1];
        int[] minor = new int[1];
        GLES31.glGetIntegerv(GLES31.GL_MAJOR_VERSION, major, 0);
        GLES31.glGetIntegerv(GLES31.GL_MINOR_VERSION, minor, 0);
        if (major[0] < 3 || (major[0] == 3 && minor[0] < 1)) {
            throw new KernelException(
                    "the GPU has OpenGL ES " + major[0] + "." + minor[0] + ", and 3.1 is needed");
        }
    }

    private static String eglError() {
        return "EGL error 0x" + Integer.toHexString(EGL14.eglGetError());
    }
}
