package android.opengl;

import stub.Unknown;

public class EGLExt {
    public static final int EGL_OPENGL_ES3_BIT_KHR = Unknown.INT;
}
