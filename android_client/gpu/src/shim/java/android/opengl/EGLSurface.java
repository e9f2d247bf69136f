package android.opengl;

import com.sun.jna.Pointer;

/** For tests: a handle of EGL's. */
public class EGLSurface {
    final Pointer pointer;

    EGLSurface(Pointer pointer) {
        this.pointer = pointer;
    }
}
