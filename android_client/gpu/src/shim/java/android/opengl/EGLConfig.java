package android.opengl;

import com.sun.jna.Pointer;

/** For tests: a handle of EGL's. */
public class EGLConfig {
    final Pointer pointer;

    EGLConfig(Pointer pointer) {
        this.pointer = pointer;
    }
}
