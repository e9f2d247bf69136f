package android.opengl;

public class EGLContext extends EGLObjectHandle {
    EGLContext() {}
}
