package cleave.core.profile;

/** Some seconds of a run under load. */
final class Window {
    /** Since the run began, at the window's middle. */
    final double atS;

    final double flopsPerS;

    /** Of the battery; NaN where unknown. */
    final double temperatureC;

    Window(double atS, double flopsPerS, double temperatureC) {
        this.atS = atS;
        this.flopsPerS = flopsPerS;
        this.temperatureC = temperatureC;
    }
}
