package cleave.core.device;

/** One thing that a device core wants done. */
public interface Action {
    /** Have a shell do it. */
    void in(Shell shell);
}
