package cleave.core.policy;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertFalse;
import static org.junit.Assert.assertTrue;

import java.util.Map;
import org.junit.Test;

public class TelemetryTest {
    private static final long SECOND = 1_000_000_000L;

    private long nanos;
    private Battery battery = new Battery(false, 0.8, 31.5, 4);
    private Throttling throttling = Throttling.LIGHT;
    private final Telemetry telemetry =
            new Telemetry(() -> battery, () -> throttling, () -> nanos);

    private Map<String, Double> readAfter(double seconds) {
        nanos += (long) (seconds * SECOND);
        return telemetry.read();
    }

    @Test
    public void aCurrentThatIsInMilliamperesIsNotBelieved() {
        assertEquals(1.6, Battery.drawW(400_000, 4000), 1e-12);
        assertEquals(1.6, Battery.drawW(-400_000, 4000), 1e-12);
        assertEquals(0.04, Battery.drawW(10_000, 4000), 1e-12);
        int[] none = {9_999, -400, 0, Integer.MIN_VALUE};
        for (int current : none) {
            assertTrue(String.valueOf(current), Double.isNaN(Battery.drawW(current, 4000)));
        }
        assertTrue(Double.isNaN(Battery.drawW(400_000, 0)));
    }

    @Test
    public void tellsWhatIsKnown() {
        Map<String, Double> values = readAfter(10);
        assertEquals(0.8, values.get("battery_ratio"), 0);
        assertEquals(31.5, values.get("temperature_c"), 0);
        assertEquals(4, values.get("power_w"), 0);
        assertEquals(40, values.get("energy_j"), 1e-9);
        assertEquals(1, values.get("thermal_status"), 0);
    }

    @Test
    public void energyIsPowerOverTime() {
        readAfter(10);
        battery = new Battery(false, 0.8, 31.5, 6);
        assertEquals(40 + 50, readAfter(10).get("energy_j"), 1e-9);
        telemetry.restart();
        assertEquals(12, readAfter(2).get("energy_j"), 1e-9);
    }

    @Test
    public void whatAChargerGivesIsNotGuessed() {
        readAfter(10);
        battery = new Battery(true, 0.8, 31.5, 6);
        Map<String, Double> plugged = readAfter(10);
        assertFalse(plugged.containsKey("power_w"));
        assertFalse(plugged.containsKey("energy_j"));
        battery = new Battery(false, 0.8, 31.5, 6);
        Map<String, Double> unplugged = readAfter(10);
        assertEquals(6, unplugged.get("power_w"), 0);
        assertFalse("some of it was not seen", unplugged.containsKey("energy_j"));
    }

    @Test
    public void whatIsNotKnownIsLeftOut() {
        battery = new Battery(false, Double.NaN, Double.NaN, Double.NaN);
        throttling = Throttling.UNKNOWN;
        assertEquals(0, readAfter(1).size());
    }
}
