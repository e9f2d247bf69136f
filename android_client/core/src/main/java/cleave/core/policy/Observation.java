package cleave.core.policy;

/** What can be seen of a phone now. */
public final class Observation {
    public final int minuteOfDay;
    public final boolean charging;

    /** Whether the network is Wi-Fi or a cable, and not metered. */
    public final boolean onWifi;

    /** Of the battery; NaN where it cannot be seen. */
    public final double temperatureC;

    public final Throttling throttling;

    public Observation(
            int minuteOfDay,
            boolean charging,
            boolean onWifi,
            double temperatureC,
            Throttling throttling) {
        this.minuteOfDay = minuteOfDay;
        this.charging = charging;
        this.onWifi = onWifi;
        this.temperatureC = temperatureC;
        this.throttling = throttling;
    }
}
