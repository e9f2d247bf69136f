package cleave.core.policy;

import cleave.core.Verdict;
import java.util.Locale;
import java.util.function.LongSupplier;
import java.util.function.ToLongFunction;

/**
 * Opens and closes with what is seen of the phone, without flapping: too hot lasts until it has
 * cooled, and a charger or Wi-Fi that was away counts again once it has stayed.
 */
public final class Gate {
    /** A phone that was too hot works again when it is this much cooler than the limit. */
    public static final double COOL_BY_C = 3;

    /** How long a charger or Wi-Fi that was away has to be there again. */
    public static final double STEADY_S = 30;

    private static final double NANOS_PER_S = 1e9;

    private final LongSupplier nanos;
    private final ToLongFunction<DataCap.Span> usedBytes;
    private Policy policy;
    private boolean hot;
    private boolean throttled;
    private boolean unsteady; // closed for the charger or Wi-Fi, and not steady since
    private boolean back; // whether what was away is there again, since then:
    private long backNanos;

    /**
     * @param nanos a clock that never goes back, and goes on while the phone sleeps
     * @param usedBytes what was sent and received of a span until now
     */
    public Gate(Policy policy, LongSupplier nanos, ToLongFunction<DataCap.Span> usedBytes) {
        this.policy = policy;
        this.nanos = nanos;
        this.usedBytes = usedBytes;
    }

    /** Other conditions from now on; heat lasts, and charger and Wi-Fi count as they are now. */
    public void setPolicy(Policy changed) {
        policy = changed;
        unsteady = false;
    }

    /** May it work? The first reason against it, if not. What cannot be seen is not guessed. */
    public Verdict decide(Observation seen) {
        boolean tooHot = isTooHot(seen);
        boolean tooSlow = isThrottled(seen);
        String absent = absent(seen);
        boolean flaps = isUnsteady(absent != null);
        if (policy.hours != null && !policy.hours.contains(seen.minuteOfDay)) {
            return Verdict.pause("it is not between " + policy.hours);
        }
        if (absent != null) {
            return Verdict.pause(absent);
        }
        if (flaps) {
            return Verdict.pause(
                    String.format(
                            Locale.ROOT,
                            "its charger or Wi-Fi came back less than %.0f s ago",
                            STEADY_S));
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
        if (tooSlow) {
            return Verdict.pause("the system slows it down for its heat");
        }
        DataCap cap = policy.dataCap;
        return cap != null && usedBytes.applyAsLong(cap.span) >= cap.bytes
                ? Verdict.pause("its data limit of " + cap + " is reached")
                : Verdict.WORK;
    }

    /** Which of those that come and go is not there; null for none. */
    private String absent(Observation seen) {
        if (policy.whenCharging && !seen.charging) {
            return "it is not charging";
        }
        return policy.onWifi && !seen.onWifi ? "it is not on Wi-Fi that is free to use" : null;
    }

    private boolean isUnsteady(boolean absent) {
        if (absent) {
            unsteady = true;
            back = false;
        } else if (unsteady && !back) {
            back = true;
            backNanos = nanos.getAsLong();
        } else if (unsteady) {
            unsteady = nanos.getAsLong() - backNanos < STEADY_S * NANOS_PER_S;
        }
        return unsteady;
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
