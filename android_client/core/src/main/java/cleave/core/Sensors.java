package cleave.core;

import java.util.Map;

/** How the device is, for the server and its operator to see. */
public interface Sensors {
    /**
     * What is known now, by names with SI units at their end: {@code temperature_c}, {@code
     * battery_ratio}, {@code power_w}, {@code energy_j} (used since the session began), {@code
     * thermal_status}. Values that are not known are left out. At most 64 names in a session's
     * life. Called seldom, in a thread of the core's.
     */
    Map<String, Double> read();
}
