package cleave.core;

import cleave.core.kernels.Chosen;
import cleave.core.session.Notice;
import cleave.core.session.Welcome;

/**
 * Told of what a device does, in threads of the core's: be quick, and hand on to the thread that
 * shows it. Numbers that change all the time are asked for, see {@link Device#counts}.
 */
public interface DeviceListener {
    /** It does something else now. */
    void changed(Notice notice);

    /** A session began. */
    void welcomed(Welcome welcome);

    /** The kernel that it multiplies with from now on. */
    void chose(Chosen chosen);

    /** A kernel is not used, and why. */
    void refused(String kernel, String reason);

    /** Something went wrong that its owner should know; work goes on. */
    void warned(String text);
}
