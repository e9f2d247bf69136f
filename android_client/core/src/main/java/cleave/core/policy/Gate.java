package cleave.core.policy;

import cleave.core.Verdict;
import java.util.Locale;

/**
 * Opens and closes with what is seen of the phone, without flapping: too hot lasts until it has
 * cooled.
 */
public final class Gate {
    /** A phone that was too hot works again when it is this much cooler than the limit. */
    public static final double COOL_BY_C = 3;

    private final Policy policy;
    private boolean hot;
    private boolean throttled;

    public Gate(Policy policy) {
        this.policy = policy;
    }

    /** May it work? The first reason against it, if not. What cannot be seen is not guessed. */
    public Verdict decide(Observation seen) {
        boolean tooHot = isTooHot(seen);
        boolean tooSlow = isThrottled(seen);
        if (policy.hours != null && !policy.hours.contains(seen.minuteOfDay)) {
            return Verdict.pause("it is not between " + policy.hours);
        }
        if (policy.whenCharging && !seen.charging) {
            return Verdict.pause("it is not charging");
        }
        if (policy.onWifi && !seen.onWifi) {
            return Verdict.pause("it is not on Wi-Fi that is free to use");
        }
        if (Double.isNaN(seen.temperatureC)) {
            return Verdict.pause("its temperature cannot be seen");
        }
        if (tooHot) {
            // Without the temperature of now: each other text is another notice.
            return Verdict.pause(
                    String.format(
                            Locale.ROOT,
                            "its battery is too warm, until it has %.0f °C",
                            policy.maxTemperatureC - COOL_BY_C));
        }
        return tooSlow ? Verdict.pause("the system slows it down for its heat") : Verdict.WORK;
    }

    private boolean isTooHot(Observation seen) {
        double limit = hot ? policy.maxTemperatureC - COOL_BY_C : policy.maxTemperatureC;
        hot = seen.temperatureC > limit;
        return hot;
    }

    private boolean isThrottled(Observation seen) {
        throttled = seen.throttling.isSevere() || (throttled && seen.throttling.slowsDown());
        return throttled;
    }
}
