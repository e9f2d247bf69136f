package cleave.core.policy;

import java.util.Locale;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/** A span of the day, in local time; its end may be past midnight. */
public final class Hours {
    private static final int MINUTES_OF_DAY = 24 * 60;
    private static final Pattern SPAN =
            Pattern.compile("(\\d{1,2})(?::(\\d{2}))?\\s*-\\s*(\\d{1,2})(?::(\\d{2}))?");

    private final int startMinute;
    private final int endMinute;

    private Hours(int startMinute, int endMinute) {
        this.startMinute = startMinute;
        this.endMinute = endMinute;
    }

    /**
     * Read what people write: {@code 22-7}, {@code 8:30-17}.
     *
     * @throws IllegalArgumentException when it is no span, or an empty one; it says what to do
     */
    public static Hours parse(String text) {
        Matcher found = SPAN.matcher(text.trim());
        if (found.matches()) {
            int start = minute(found.group(1), found.group(2));
            int end = minute(found.group(3), found.group(4));
            if (start >= 0 && end >= 0 && start % MINUTES_OF_DAY != end % MINUTES_OF_DAY) {
                return new Hours(start % MINUTES_OF_DAY, end % MINUTES_OF_DAY);
            }
        }
        throw new IllegalArgumentException(
                "'" + text + "' is no span of hours; write one like 22-7 or 8:30-17");
    }

    /** Whether a minute of the day lies from the first to before the last. */
    boolean contains(int minuteOfDay) {
        return startMinute < endMinute
                ? startMinute <= minuteOfDay && minuteOfDay < endMinute
                : minuteOfDay >= startMinute || minuteOfDay < endMinute;
    }

    @Override
    public String toString() {
        return text(startMinute) + "-" + text(endMinute);
    }

    private static int minute(String hour, String minute) {
        int hours = Integer.parseInt(hour);
        int minutes = minute == null ? 0 : Integer.parseInt(minute);
        int both = 60 * hours + minutes;
        return minutes < 60 && both <= MINUTES_OF_DAY ? both : -1;
    }

    private static String text(int minuteOfDay) {
        int hours = minuteOfDay / 60;
        int minutes = minuteOfDay % 60;
        return minutes == 0
                ? String.valueOf(hours)
                : String.format(Locale.ROOT, "%d:%02d", hours, minutes);
    }
}
