package android.opengl;

public class EGLConfig extends EGLObjectHandle {
    EGLConfig() {}
}
