package android.opengl;

public class EGLSurface extends EGLObjectHandle {
    EGLSurface() {}
}
