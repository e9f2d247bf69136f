package android.opengl;

import com.sun.jna.Pointer;

/** For tests: a handle of EGL's. */
public class EGLDisplay {
    final Pointer pointer;

    EGLDisplay(Pointer pointer) {
        this.pointer = pointer;
    }
}
