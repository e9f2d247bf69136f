package cleave.core.policy;

import cleave.core.Sensors;
import java.util.HashMap;
import java.util.Map;
import java.util.function.LongSupplier;
import java.util.function.Supplier;

/**
 * What the server is told of the phone. Power and energy are told as long as all of it came from
 * the battery: what a charger gives cannot be seen.
 */
public final class Telemetry implements Sensors {
    private static final double NANOS_PER_S = 1e9;

    private final Supplier<Battery> battery;
    private final Supplier<Throttling> throttling;
    private final LongSupplier nanos;
    private double energyJ;
    private double lastW = Double.NaN;
    private long lastNanos;
    private boolean complete = true; // whether all of the energy was seen

    /**
     * @param nanos a clock that never goes back
     */
    public Telemetry(
            Supplier<Battery> battery, Supplier<Throttling> throttling, LongSupplier nanos) {
        this.battery = battery;
        this.throttling = throttling;
        this.nanos = nanos;
        lastNanos = nanos.getAsLong();
    }

    @Override
    public synchronized Map<String, Double> read() {
        Battery seen = battery.get();
        double watts = seen.charging ? Double.NaN : seen.drawW;
        count(watts);
        Map<String, Double> values = new HashMap<>();
        put(values, "battery_ratio", seen.level);
        put(values, "temperature_c", seen.temperatureC);
        put(values, "power_w", watts);
        if (complete) {
            put(values, "energy_j", energyJ);
        }
        Throttling slowed = throttling.get();
        if (slowed != Throttling.UNKNOWN) {
            values.put("thermal_status", (double) (slowed.ordinal() - Throttling.NONE.ordinal()));
        }
        return values;
    }

    /** A session begins: energy counts from now on. */
    public synchronized void restart() {
        energyJ = 0;
        complete = true;
        lastW = Double.NaN;
        lastNanos = nanos.getAsLong();
    }

    private void count(double watts) {
        long now = nanos.getAsLong();
        double elapsedS = (now - lastNanos) / NANOS_PER_S;
        complete &= !Double.isNaN(watts);
        if (complete) {
            energyJ += elapsedS * (Double.isNaN(lastW) ? watts : (lastW + watts) / 2);
        }
        lastW = watts;
        lastNanos = now;
    }

    private static void put(Map<String, Double> values, String name, double value) {
        if (!Double.isNaN(value)) {
            values.put(name, value);
        }
    }
}
