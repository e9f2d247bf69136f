package cleave.core.policy;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertThrows;
import static org.junit.Assert.assertTrue;

import cleave.core.policy.DataCap.Span;
import cleave.core.session.Counts;
import java.util.Calendar;
import java.util.GregorianCalendar;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.atomic.AtomicLong;
import org.junit.Test;

public class DataMeterTest {
    private final Map<String, String> kept = new HashMap<>();
    private final AtomicLong nanos = new AtomicLong(-7);
    private Calendar now = new GregorianCalendar(2026, Calendar.JANUARY, 5, 7, 59);

    private final DataMeter.Store store =
            new DataMeter.Store() {
                @Override
                public String read(String name) {
                    return kept.getOrDefault(name, "");
                }

                @Override
                public void write(String name, String text) {
                    kept.put(name, text);
                }
            };

    private DataMeter meter() {
        DataMeter made = new DataMeter(store, () -> now, nanos::get);
        made.begin();
        return made;
    }

    private static Counts counts(long downBytes, long upBytes) {
        return new Counts(1, 1, downBytes, upBytes);
    }

    @Test
    public void countsBothDirectionsAndEachByteOnce() {
        DataMeter meter = meter();
        meter.count(counts(70, 30));
        meter.count(counts(80, 40));
        assertEquals(120, meter.used(Span.DAY));
        meter.begin();
        meter.count(counts(5, 5));
        assertEquals(130, meter.used(Span.HOUR));
        assertEquals(130, meter.used(Span.MONTH));
    }

    @Test
    public void aNewHourBeginsAtZero() {
        DataMeter meter = meter();
        meter.count(counts(100, 0));
        now = new GregorianCalendar(2026, Calendar.JANUARY, 5, 8, 0);
        assertEquals(0, meter.used(Span.HOUR));
        meter.count(counts(150, 0));
        assertEquals(50, meter.used(Span.HOUR));
        assertEquals(150, meter.used(Span.DAY));
    }

    @Test
    public void whatWasUsedBeforeCounts() {
        meter().count(counts(100, 20));
        DataMeter again = meter();
        again.count(counts(3, 0));
        assertEquals(123, again.used(Span.DAY));
        kept.put("used_day", "nothing of ours");
        assertEquals(0, meter().used(Span.DAY));
    }

    @Test
    public void theRateIsThatOfAMinute() {
        DataMeter meter = meter();
        meter.count(counts(1000, 0));
        assertTrue(Double.isNaN(meter.bytesPerS()));
        nanos.addAndGet(20_000_000_000L);
        meter.count(counts(1000, 1000));
        assertEquals(100, meter.bytesPerS(), 1e-9);
        nanos.addAndGet(30_000_000_000L);
        meter.count(counts(1000, 7000));
        assertEquals(100, meter.bytesPerS(), 1e-9);
        nanos.addAndGet(30_000_000_000L);
        meter.count(counts(1000, 13000));
        assertEquals(200, meter.bytesPerS(), 1e-9);
    }

    @Test
    public void aLimitIsReadAsPeopleWriteIt() {
        assertEquals("500MB/hour", DataCap.parse(" 500 mb/Hour").toString());
        assertEquals("2.5GB/day", DataCap.parse("2.5GB/day").toString());
        assertEquals("20GB/month", DataCap.parse("20000MB/month").toString());
        assertEquals(2_500_000_000L, DataCap.parse("2.5GB/day").bytes);
        for (String none : new String[] {"", "5", "5GB", "5GB/year", "0MB/day", "-1GB/day"}) {
            IllegalArgumentException error =
                    assertThrows(IllegalArgumentException.class, () -> DataCap.parse(none));
            assertTrue(error.getMessage(), error.getMessage().contains("2GB/day"));
        }
    }
}
