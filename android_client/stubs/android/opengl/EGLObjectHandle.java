package android.opengl;

public abstract class EGLObjectHandle {
    EGLObjectHandle() {}
}
