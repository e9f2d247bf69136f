package android.opengl;

public class EGLDisplay extends EGLObjectHandle {
    EGLDisplay() {}
}
