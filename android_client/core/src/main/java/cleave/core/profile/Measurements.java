package cleave.core.profile;

import java.util.Collections;
import java.util.List;

/** All that a {@link ProfileRun} found. */
public final class Measurements {
    final String kernel;
    final List<Sample> samples;
    final List<Window> windows;

    Measurements(String kernel, List<Sample> samples, List<Window> windows) {
        this.kernel = kernel;
        this.samples = Collections.unmodifiableList(samples);
        this.windows = Collections.unmodifiableList(windows);
    }
}
