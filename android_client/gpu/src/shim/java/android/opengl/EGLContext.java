package android.opengl;

import com.sun.jna.Pointer;

/** For tests: a handle of EGL's. */
public class EGLContext {
    final Pointer pointer;

    EGLContext(Pointer pointer) {
        this.pointer = pointer;
    }
}
