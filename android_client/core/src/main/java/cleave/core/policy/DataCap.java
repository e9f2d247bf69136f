package cleave.core.policy;

import java.util.Calendar;
import java.util.Locale;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** A limit of bytes, down and up together, over an hour, a day or a month of the local clock. */
public final class DataCap {
    /** Over what bytes are counted. */
    public enum Span {
        HOUR,
        DAY,
        MONTH;

        /** Names the span that a time is in. */
        String named(Calendar now) {
            String month =
                    String.format(
                            Locale.ROOT,
                            "%d-%02d",
                            now.get(Calendar.YEAR),
                            now.get(Calendar.MONTH) + 1);
            if (this == MONTH) {
                return month;
            }
            String day = month + String.format(Locale.ROOT, "-%02d", now.get(Calendar.DATE));
            return this == DAY
                    ? day
                    : day + String.format(Locale.ROOT, " %02d", now.get(Calendar.HOUR_OF_DAY));
        }
    }

    private static final double MEGA = 1e6;
    private static final double GIGA = 1e9;
    private static final Pattern CAP =
            Pattern.compile(
                    "(\\d+(?:\\.\\d+)?)\\s*(MB|GB)\\s*/\\s*(hour|day|month)",
                    Pattern.CASE_INSENSITIVE);

    public final long bytes;
    public final Span span;

    private DataCap(long bytes, Span span) {
        this.bytes = bytes;
        this.span = span;
    }

    /**
     * Read what people write: {@code 500MB/hour}, {@code 2.5 GB/day}.
     *
     * @throws IllegalArgumentException when it is no limit, or below a megabyte; it says what to do
     */
    public static DataCap parse(String text) {
        Matcher found = CAP.matcher(text.trim());
        if (found.matches()) {
            double unit = found.group(2).equalsIgnoreCase("MB") ? MEGA : GIGA;
            double bytes = Double.parseDouble(found.group(1)) * unit;
            if (bytes >= MEGA && bytes < Long.MAX_VALUE) {
                return new DataCap(
                        (long) bytes, Span.valueOf(found.group(3).toUpperCase(Locale.ROOT)));
            }
        }
        throw new IllegalArgumentException(
                "'" + text + "' is no limit of data; write one like 500MB/hour or 2GB/day");
    }

    @Override
    public String toString() {
        boolean large = bytes >= GIGA;
        String amount =
                String.format(Locale.ROOT, "%.3f", bytes / (large ? GIGA : MEGA))
                        .replaceAll("\\.?0+$", "");
        return amount + (large ? "GB/" : "MB/") + span.name().toLowerCase(Locale.ROOT);
    }
}
