package cleave.app;

import android.content.res.Resources;
import cleave.core.session.Counts;
import cleave.core.session.Notice;
import java.util.Locale;

/** What is said of the device's state, in the user's language. */
final class Words {
    private static final String[] DECIMAL = {"", "k", "M", "G", "T", "P"};

    private final Resources resources;

    Words(Resources resources) {
        this.resources = resources;
    }

    /** One line: what it does, and why. */
    String state(Notice notice, String host) {
        String state = doing(notice, host);
        return notice.reason.isEmpty()
                ? state
                : resources.getString(R.string.with_reason, state, notice.reason);
    }

    String counts(Counts counts) {
        return resources.getString(
                R.string.counts,
                String.format(Locale.getDefault(), "%,d", counts.blocks),
                quantity(counts.flops, "FLOP"),
                quantity(counts.downBytes, "B"),
                quantity(counts.upBytes, "B"));
    }

    /** What a use of data comes to; empty where it is not known yet. */
    String dataUse(double bytesPerS) {
        return Double.isNaN(bytesPerS)
                ? ""
                : resources.getString(
                        R.string.data_use,
                        quantity(60 * bytesPerS, "B"),
                        quantity(3600 * bytesPerS, "B"));
    }

    /** A number with three digits and its unit: 1.23 GB. */
    static String quantity(double value, String unit) {
        int step = 0;
        double shown = value;
        while (shown >= 999.5 && step < DECIMAL.length - 1) {
            shown /= 1000;
            step++;
        }
        int decimals = step == 0 || shown >= 99.95 ? 0 : shown >= 9.995 ? 1 : 2;
        return String.format(
                Locale.getDefault(), "%." + decimals + "f %s%s", shown, DECIMAL[step], unit);
    }

    private String doing(Notice notice, String host) {
        switch (notice.state) {
            case STARTING:
                return resources.getString(R.string.state_starting);
            case CONNECTING:
                return resources.getString(R.string.state_connecting, host);
            case WORKING:
                return resources.getString(R.string.state_working, host);
            case DRAINING:
                return resources.getString(R.string.state_draining);
            case PAUSED:
                return resources.getString(R.string.state_paused);
            case WAITING:
                return resources.getString(R.string.state_waiting, host);
            default:
                return resources.getString(R.string.state_ended);
        }
    }
}
