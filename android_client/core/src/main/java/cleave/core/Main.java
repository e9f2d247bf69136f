package cleave.core;

import cleave.core.graphs.OpenGraph;
import cleave.core.kernels.Chosen;
import cleave.core.kernels.CpuKernel;
import cleave.core.session.Counts;
import cleave.core.session.End;
import cleave.core.session.LinkRates;
import cleave.core.session.Notice;
import cleave.core.session.State;
import cleave.core.session.Welcome;
import java.io.BufferedReader;
import java.io.File;
import java.io.FileInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.Iterator;
import java.util.Locale;
import java.util.Map;
import java.util.concurrent.ThreadFactory;

/**
 * A device without a phone: joins a server from a command line, and says what happens as lines of
 * JSON. Lines on its standard input are commands: {@code pause REASON}, {@code work}, {@code stop}.
 */
public final class Main {
    private static final String USAGE =
            "usage: cleave.core.Main [--name NAME] [--memory-mib N] [--threads N] [--state FOLDER] "
                    + "LINK\n       cleave.core.Main --measure LINK\n"
                    + "LINK is the join link that the server shows, or @FILE to read it from a "
                    + "file, which others cannot see.";

    private static final int USAGE_EXIT = 2;
    private static final int REFUSED_EXIT = 1;
    private static final long DEFAULT_MEMORY_MIB = 256;

    private Main() {}

    public static void main(String[] arguments) throws InterruptedException {
        run(arguments, null);
    }

    /**
     * Be a device until it is stopped, then end the process.
     *
     * @param graphs what runs graphs; null for a device that only multiplies
     */
    public static void run(String[] arguments, OpenGraph graphs) throws InterruptedException {
        Device device;
        try {
            if (arguments.length == 2 && arguments[0].equals("--measure")) {
                measure(JoinLink.parse(read(arguments[1])));
                return;
            }
            device = device(arguments, graphs);
        } catch (InvalidLinkException | IllegalArgumentException | IOException error) {
            System.err.println(error.getMessage());
            System.exit(USAGE_EXIT);
            return;
        }
        Thread working = new Thread(device, "cleave-device");
        working.start();
        Thread main = Thread.currentThread(); // which says that it left before all ends
        Runtime.getRuntime().addShutdownHook(new Thread(() -> stop(device, main)));
        Thread commands = new Thread(() -> obey(device), "cleave-commands");
        commands.setDaemon(true);
        commands.start();
        working.join();
        Counts counts = device.counts();
        say(
                "left",
                "blocks", counts.blocks,
                "flops", counts.flops,
                "down_bytes", counts.downBytes,
                "up_bytes", counts.upBytes);
        Notice last = device.notice();
        boolean failed = last.end != null && last.end != End.BYE;
        Runtime.getRuntime().halt(failed ? REFUSED_EXIT : 0);
    }

    /** Has the server measure the link, with the code of the link itself, which is not used up. */
    private static void measure(JoinLink link) throws IOException, InterruptedException {
        LinkRates rates = LinkMeter.measure(link, new FileCredentialStore(new File("")));
        say(
                "measured",
                "downlink_bytes_per_s", rates.downlinkBytesPerS,
                "uplink_bytes_per_s", rates.uplinkBytesPerS,
                "latency_s", rates.latencyS);
    }

    private static Device device(String[] arguments, OpenGraph graphs)
            throws InvalidLinkException, IOException {
        Map<String, String> options = new HashMap<>();
        String link = null;
        for (Iterator<String> rest = Arrays.asList(arguments).iterator(); rest.hasNext(); ) {
            String next = rest.next();
            if (next.startsWith("--") && rest.hasNext()) {
                options.put(next.substring(2), rest.next());
            } else if (link == null && !next.startsWith("--")) {
                link = next;
            } else {
                throw new IllegalArgumentException("'" + next + "' is not understood\n" + USAGE);
            }
        }
        if (link == null) {
            throw new IllegalArgumentException(USAGE);
        }
        String state = option(options, "state", System.getProperty("user.home") + "/.cleave-jvm");
        String name = option(options, "name", "JVM");
        long memoryMib = number(options, "memory-mib", DEFAULT_MEMORY_MIB);
        long threads = number(options, "threads", Runtime.getRuntime().availableProcessors());
        if (!options.isEmpty()) {
            String unknown = options.keySet().iterator().next();
            throw new IllegalArgumentException("there is no --" + unknown + "\n" + USAGE);
        }
        ThreadFactory daemons =
                task -> {
                    Thread thread = new Thread(task, "cleave-kernel");
                    thread.setDaemon(true);
                    return thread;
                };
        return new Device(
                JoinLink.parse(read(link)),
                new DeviceDescription(name, memoryMib << 20, "", ""),
                Collections.singletonList(CpuKernel.factory((int) threads, daemons)),
                new FileCredentialStore(new File(state)),
                null,
                new Printer(),
                daemons,
                graphs);
    }

    private static String option(Map<String, String> options, String name, String missing) {
        String value = options.remove(name);
        return value == null ? missing : value;
    }

    private static long number(Map<String, String> options, String name, long missing) {
        String value = option(options, name, String.valueOf(missing));
        try {
            long number = Long.parseLong(value);
            if (number >= 1 && number <= Integer.MAX_VALUE) {
                return number;
            }
        } catch (NumberFormatException error) {
            // Told below, as is a number that is too small.
        }
        throw new IllegalArgumentException(
                "--" + name + " takes a whole number from 1 on, not '" + value + "'");
    }

    private static String read(String link) throws IOException {
        if (!link.startsWith("@")) {
            return link;
        }
        File file = new File(link.substring(1));
        try (BufferedReader reader = reader(new FileInputStream(file))) {
            String line = reader.readLine();
            return line == null ? "" : line;
        } catch (IOException error) {
            throw new IOException(
                    "the join link cannot be read from " + file + " (" + error.getMessage()
                            + "); write it there, or pass the link itself",
                    error);
        }
    }

    private static BufferedReader reader(InputStream in) {
        return new BufferedReader(new InputStreamReader(in, StandardCharsets.UTF_8));
    }

    private static void obey(Device device) {
        try (BufferedReader commands = reader(System.in)) {
            for (String line = commands.readLine(); line != null; line = commands.readLine()) {
                if (line.startsWith("pause")) {
                    device.allow(Verdict.pause(line.substring("pause".length()).trim()));
                } else if (line.equals("work")) {
                    device.allow(Verdict.WORK);
                } else if (line.equals("stop")) {
                    device.stop();
                }
            }
        } catch (IOException error) {
            System.err.println("commands cannot be read any more: " + error.getMessage());
        }
    }

    /** The process is told to end: what was given is answered first. */
    private static void stop(Device device, Thread main) {
        device.stop();
        try {
            main.join();
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
        }
    }

    private static synchronized void say(String event, Object... fields) {
        StringBuilder line = new StringBuilder("{\"event\": ").append(quoted(event));
        for (int i = 0; i < fields.length; i += 2) {
            Object value = fields[i + 1];
            line.append(", ").append(quoted((String) fields[i])).append(": ");
            line.append(value instanceof Number ? value.toString() : quoted(value.toString()));
        }
        System.out.println(line.append('}'));
        System.out.flush();
    }

    private static String quoted(String text) {
        StringBuilder found = new StringBuilder("\"");
        for (char c : text.toCharArray()) {
            if (c == '"' || c == '\\') {
                found.append('\\').append(c);
            } else if (c < ' ' || c > '~') {
                found.append(String.format(Locale.ROOT, "\\u%04x", (int) c));
            } else {
                found.append(c);
            }
        }
        return found.append('"').toString();
    }

    private static final class Printer implements DeviceListener {
        @Override
        public void changed(Notice notice) {
            String state = notice.state.name().toLowerCase(Locale.ROOT);
            if (notice.state == State.WAITING) {
                say(state, "reason", notice.reason, "retry_s", notice.retryS);
            } else if (notice.code != null) {
                say(state, "reason", notice.reason, "code", notice.code.wireName);
            } else {
                say(state, "reason", notice.reason);
            }
        }

        @Override
        public void welcomed(Welcome welcome) {
            say("welcomed", "device", welcome.device, "server", welcome.server);
        }

        @Override
        public void chose(Chosen chosen) {
            say(
                    "kernel",
                    "name", chosen.kernel.name(),
                    "about", chosen.kernel.about(),
                    "flops_per_s", chosen.flopsPerS);
        }

        @Override
        public void refused(String kernel, String reason) {
            say("kernel_refused", "name", kernel, "reason", reason);
        }

        @Override
        public void warned(String text) {
            say("warning", "text", text);
        }
    }
}
