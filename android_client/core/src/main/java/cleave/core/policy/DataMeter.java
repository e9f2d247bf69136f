package cleave.core.policy;

import cleave.core.session.Counts;
import java.util.Calendar;
import java.util.HashMap;
import java.util.Locale;
import java.util.Map;
import java.util.function.LongSupplier;
import java.util.function.Supplier;

/** Counts bytes over hours, days and months, also over several starts of the app. */
public final class DataMeter {
    /** Keeps a text under a name; empty where there is none. */
    public interface Store {
        String read(String name);

        void write(String name, String text);
    }

    private static final double NANOS_PER_S = 1e9;
    private static final double LEAST_S = 15;
    private static final double WINDOW_S = 60;
    private static final char BETWEEN = '|';

    private final Store store;
    private final Supplier<Calendar> now;
    private final LongSupplier nanos;
    private final Map<DataCap.Span, String> names = new HashMap<>();
    private final Map<DataCap.Span, Long> used = new HashMap<>();
    private long visit; // bytes of the device's counters so far
    private long counted; // since the window began
    private long beganNanos;
    private double bytesPerS = Double.NaN;

    /**
     * @param now the local time
     * @param nanos a clock that never goes back, and goes on while the phone sleeps
     */
    public DataMeter(Store store, Supplier<Calendar> now, LongSupplier nanos) {
        this.store = store;
        this.now = now;
        this.nanos = nanos;
        for (DataCap.Span span : DataCap.Span.values()) {
            read(span);
        }
    }

    /** The device starts anew, and so do its counters. */
    public synchronized void begin() {
        visit = 0;
        counted = 0;
        beganNanos = nanos.getAsLong();
        bytesPerS = Double.NaN;
    }

    /** Take in a device's counters. */
    public synchronized void count(Counts counts) {
        long more = counts.downBytes + counts.upBytes - visit;
        visit += more;
        counted += more;
        measure();
        if (more == 0) {
            return;
        }
        for (DataCap.Span span : DataCap.Span.values()) {
            long sum = used(span) + more;
            names.put(span, span.named(now.get()));
            used.put(span, sum);
            store.write(key(span), names.get(span) + BETWEEN + sum);
        }
    }

    /** Bytes of the span that is now. */
    public synchronized long used(DataCap.Span span) {
        return span.named(now.get()).equals(names.get(span)) ? used.get(span) : 0;
    }

    /** Bytes a second lately, both ways together; NaN where it is too early to say. */
    public synchronized double bytesPerS() {
        return bytesPerS;
    }

    private void measure() {
        double elapsedS = (nanos.getAsLong() - beganNanos) / NANOS_PER_S;
        if (elapsedS >= WINDOW_S || (elapsedS >= LEAST_S && Double.isNaN(bytesPerS))) {
            bytesPerS = counted / elapsedS;
            counted = 0;
            beganNanos = nanos.getAsLong();
        }
    }

    private void read(DataCap.Span span) {
        String text = store.read(key(span));
        int at = text.lastIndexOf(BETWEEN);
        try {
            used.put(span, Long.parseLong(text.substring(at + 1)));
            names.put(span, text.substring(0, Math.max(at, 0)));
        } catch (NumberFormatException error) { // nothing was kept, or it is not ours
            names.put(span, "");
        }
    }

    private static String key(DataCap.Span span) {
        return "used_" + span.name().toLowerCase(Locale.ROOT);
    }
}
