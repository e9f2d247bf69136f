package cleave.core.policy;

/** What the system tells of the battery now; NaN for what it does not. */
public final class Battery {
    public final boolean charging;

    /** From 0 to 1. */
    public final double level;

    public final double temperatureC;

    /** Drawn from it, positive; of a phone that is plugged in this says nothing. */
    public final double drawW;

    public Battery(boolean charging, double level, double temperatureC, double drawW) {
        this.charging = charging;
        this.level = level;
        this.temperatureC = temperatureC;
        this.drawW = drawW;
    }
}
