package cleave.core;

import cleave.core.protocol.Limits;
import java.util.HashMap;
import java.util.HashSet;
import java.util.Map;
import java.util.Set;

/** What of a device's sensors a server takes: numbers, under so many names in a session's life. */
final class Readings {
    private final Set<String> names = new HashSet<>();

    /**
     * The values that may be sent; names beyond the limit are left out from their first time on.
     */
    Map<String, Double> allowed(Map<String, Double> read) {
        Map<String, Double> allowed = new HashMap<>();
        for (Map.Entry<String, Double> entry : read.entrySet()) {
            double value = entry.getValue();
            boolean known = names.contains(entry.getKey());
            boolean room = known || names.size() < Limits.MAX_TELEMETRY;
            if (room && !Double.isNaN(value) && !Double.isInfinite(value)) {
                names.add(entry.getKey());
                allowed.put(entry.getKey(), value);
            }
        }
        return allowed;
    }
}
