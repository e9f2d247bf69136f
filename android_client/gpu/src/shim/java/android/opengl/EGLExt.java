package android.opengl;

/** For tests, like {@link GLES20}. */
public class EGLExt {
    public static final int EGL_OPENGL_ES3_BIT_KHR = 0x00000040;
}
