package cleave.core.profile;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.TreeMap;

/** Writes a device profile, in the schema of {@code docs/profiles.md}. */
public final class ProfileFile {
    private static final int MOST_OF_NAME = 64;

    private ProfileFile() {}

    /** What fleets call the phone: of its title's letters, digits and dots, the rest dashes. */
    public static String name(Phone phone) {
        String plain = phone.title.toLowerCase(Locale.ROOT).replaceAll("[^a-z0-9.]+", "-");
        String trimmed = plain.replaceAll("^[.-]+", "").replaceAll("-+$", "");
        String name = trimmed.isEmpty() ? "phone" : trimmed;
        return name.substring(0, Math.min(MOST_OF_NAME, name.length()));
    }

    /**
     * The profile as TOML.
     *
     * @param date of measuring, as 2026-11-21
     * @param version of the app
     */
    public static String toml(Phone phone, Measurements measured, String date, String version) {
        StringBuilder text = new StringBuilder();
        line(text, "schema = 1");
        line(text, "name = " + quoted(name(phone)));
        line(text, "title = " + quoted(phone.title.isEmpty() ? "A phone" : phone.title));
        line(text, "kind = " + quoted(phone.isTablet ? "tablet" : "phone"));
        line(text, "\n[provenance]");
        line(text, "origin = \"measured\"");
        line(text, "source = " + quoted("\"Measure this phone\" of Cleave's app, " + version));
        line(text, "date = " + quoted(date));
        line(text, "notes = " + quoted("Timed in the app, without a connection to a server."));
        compute(text, measured);
        line(text, "\n[memory]");
        line(text, "bytes = " + phone.memoryBytes);
        line(text, "installed_bytes = " + phone.installedBytes);
        line(text, "source = \"what the app would offer; what the system has\"");
        sustained(text, measured.windows);
        line(text, "\n[host]");
        line(text, "cpu = " + quoted(phone.processor));
        line(text, "cores = " + phone.cores);
        line(text, "threads = " + phone.threads);
        line(text, "executor = " + quoted(measured.kernel));
        line(text, "system = " + quoted(phone.system));
        return text.toString();
    }

    private static void compute(StringBuilder text, Measurements measured) {
        Map<String, List<Sample>> byDtype = new TreeMap<>();
        for (Sample sample : measured.samples) {
            byDtype.computeIfAbsent(sample.series.dtype(), dtype -> new ArrayList<>()).add(sample);
        }
        for (Map.Entry<String, List<Sample>> entry : byDtype.entrySet()) {
            double best = 0;
            for (Sample sample : entry.getValue()) {
                best = Math.max(best, sample.flopsPerS());
            }
            line(text, "\n[compute." + quoted(entry.getKey()) + "]");
            line(text, "flops_per_s = " + number(Math.max(1e6, best)));
            line(text, "source = \"the best of its samples\"");
            line(text, "samples = [");
            for (Sample sample : entry.getValue()) {
                line(
                        text,
                        String.format(
                                Locale.ROOT,
                                "    [%d, %d, %d, \"%s\", %s, %d],",
                                sample.rows,
                                sample.columns,
                                sample.depth,
                                sample.series.layout(),
                                number(sample.seconds),
                                sample.strips));
            }
            line(text, "]");
        }
    }

    /** Speeds as shares of the first, the median of three windows, when the phone is cool. */
    private static void sustained(StringBuilder text, List<Window> windows) {
        if (windows.isEmpty()) {
            return;
        }
        double[] first = new double[Math.min(3, windows.size())];
        for (int i = 0; i < first.length; i++) {
            first[i] = windows.get(i).flopsPerS;
        }
        Arrays.sort(first);
        double full = first[first.length / 2];
        line(text, "\n[sustained]");
        line(text, "source = \"products of 512 by 512 in fp32; temperatures of the battery\"");
        line(text, "speeds = [");
        for (Window window : windows) {
            String share = number(window.flopsPerS / full);
            line(text, "    [" + number(window.atS) + ", " + share + "],");
        }
        line(text, "]");
        line(text, "temperatures = [");
        for (Window window : windows) {
            if (!Double.isNaN(window.temperatureC)) {
                line(
                        text,
                        "    [" + number(window.atS) + ", " + number(window.temperatureC) + "],");
            }
        }
        line(text, "]");
    }

    private static void line(StringBuilder text, String line) {
        text.append(line).append('\n');
    }

    private static String number(double value) {
        return String.format(Locale.ROOT, "%.6e", value);
    }

    private static String quoted(String text) {
        StringBuilder found = new StringBuilder("\"");
        for (char c : text.toCharArray()) {
            if (c == '"' || c == '\\') {
                found.append('\\').append(c);
            } else {
                found.append(Character.isISOControl(c) ? ' ' : c);
            }
        }
        return found.append('"').toString();
    }
}
