package cleave.core;

import static org.junit.Assert.assertEquals;

import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.Map;
import org.junit.Test;

public class ReadingsTest {
    private final Readings readings = new Readings();

    @Test
    public void whatIsNoNumberIsLeftOut() {
        Map<String, Double> read = new LinkedHashMap<>();
        read.put("temperature_c", 31.5);
        read.put("power_w", Double.NaN);
        read.put("energy_j", Double.POSITIVE_INFINITY);
        assertEquals(Collections.singletonMap("temperature_c", 31.5), readings.allowed(read));
    }

    @Test
    public void noMoreNamesAreToldThanASessionMayHave() {
        Map<String, Double> read = new LinkedHashMap<>();
        for (int i = 0; i < 70; i++) {
            read.put("value_" + i, 1.0);
        }
        Map<String, Double> first = readings.allowed(read);
        assertEquals(64, first.size());
        assertEquals(first, readings.allowed(read));
        assertEquals(Collections.emptyMap(), readings.allowed(Collections.singletonMap("x", 1.0)));
    }
}
