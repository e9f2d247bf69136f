package cleave.core;

import cleave.core.graphs.GraphException;
import cleave.core.graphs.OpenGraph;
import cleave.core.graphs.SelfTest;
import cleave.core.kernels.Chosen;
import cleave.core.kernels.KernelChoice;
import cleave.core.kernels.KernelException;
import cleave.core.kernels.KernelFactory;
import cleave.core.protocol.Limits;
import cleave.core.session.Counts;
import cleave.core.session.Ending;
import cleave.core.session.Guest;
import cleave.core.session.Kept;
import cleave.core.session.LinkRates;
import cleave.core.session.Notice;
import cleave.core.session.Session;
import cleave.core.session.State;
import cleave.core.session.Visit;
import cleave.core.session.Welcome;
import cleave.core.transport.OkHttpTransport;
import java.io.IOException;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.ThreadFactory;
import java.util.concurrent.TimeUnit;

/**
 * A device of one server, from its start to its end: it chooses a kernel, joins, works, and comes
 * back when the connection is lost, or goes where the server sends it. {@code run} takes a thread;
 * everything else may be called from any.
 */
public final class Device implements Runnable {
    /** How often sensors are read; the first time soon after a session began. */
    private static final long TELEMETRY_S = 30;

    private final JoinLink link;
    private final DeviceDescription description;
    private final List<KernelFactory> kernels;
    private final CredentialStore credentials;
    private final Sensors sensors;
    private final DeviceListener listener;
    private final Random random = new Random();
    private final ScheduledExecutorService timer;
    private final ExecutorService kernelThread;
    private final ServerSelection server_selection; // only who connects uses it
    private final Guest guest;
    private final Readings readings = new Readings(); // only the timer uses it
    private OpenGraph graphs; // null for none; only who connects uses it
    private OkHttpTransport transport; // to the server below; only who connects uses it
    private volatile JoinLink reached;
    private volatile Chosen chosen;
    private volatile Session session;
    private volatile String given = ""; // a credential, also if it could not be kept
    private volatile Notice notice = new Notice(State.STARTING, "");

    /**
     * @param kernels candidates, one or more; see {@link KernelChoice}
     * @param sensors null for none
     * @param threads makes the thread that multiplies, and is the kernel's own
     * @param graphs what runs graphs, if it does so exactly; null for a device that only
     *     multiplies
     */
    public Device(
            JoinLink link,
            DeviceDescription description,
            List<KernelFactory> kernels,
            CredentialStore credentials,
            Sensors sensors,
            DeviceListener listener,
            ThreadFactory threads,
            OpenGraph graphs) {
        this.link = link;
        this.description = description;
        this.kernels = new ArrayList<>(kernels);
        this.credentials = credentials;
        this.sensors = sensors;
        this.listener = listener;
        this.graphs = graphs;
        timer = Executors.newScheduledThreadPool(2, Device::timerThread);
        kernelThread = Executors.newSingleThreadExecutor(threads);
        server_selection = new ServerSelection(link);
        reach(link);
        guest =
                new Guest(
                        this::connect,
                        this::say,
                        timer,
                        System::nanoTime,
                        random::nextDouble);
    }

    /** Be a device until it is stopped, refused, or no more wanted. Once only. */
    @Override
    public void run() {
        if (sensors != null) {
            timer.scheduleWithFixedDelay(this::report, 1, TELEMETRY_S, TimeUnit.SECONDS);
        }
        try {
            guest.run();
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt(); // whoever did that wants it to end
        } finally {
            close();
        }
    }

    /** Whether it may work, from now on. Without a word it may. */
    public void allow(Verdict verdict) {
        if (verdict.mayWork()) {
            guest.resume();
        } else {
            guest.pause(verdict.reason());
        }
    }

    /** Finish what it was given, then end; a second time, end at once. */
    public void stop() {
        guest.stop();
    }

    /** The network is gone: do not wait until that shows. */
    public void offline() {
        guest.offline();
    }

    /** There is a network again: do not wait any longer. */
    public void online() {
        guest.online();
    }

    /** What it does now. */
    public Notice notice() {
        return notice;
    }

    /** What it did so far. */
    public Counts counts() {
        return guest.counts();
    }

    /** The host of the server that it is with, or tries to reach; for people. */
    public String host() {
        return reached.host;
    }

    private Visit connect() throws InterruptedException {
        Chosen with = chosen;
        if (with == null) {
            say(new Notice(State.STARTING, ""));
            try {
                with = kernelThread.submit(this::choose).get();
            } catch (ExecutionException error) {
                return new NoVisit(Ending.unable(String.valueOf(error.getCause().getMessage())));
            }
            chosen = with;
            listener.chose(with);
            graphs = exact(graphs);
            say(new Notice(State.CONNECTING, ""));
        }
        follow();
        // A server that sends the device elsewhere has this credential, and says who else takes it.
        String kept = given.isEmpty() ? credentials.find(link) : given;
        Kept before = session == null ? null : session.take();
        String holds = before == null ? "" : before.arrays.of;
        session =
                new Session(
                        transport,
                        with.kernel,
                        kernelThread,
                        Hello.of(
                                description,
                                link,
                                kept,
                                with.flopsPerS,
                                false,
                                graphs != null,
                                holds),
                        timer,
                        System::nanoTime,
                        new SessionEvents(with),
                        graphs,
                        before);
        return session;
    }

    /** Turn to the server that is due after the last session. */
    private void follow() {
        Session last = session;
        if (last != null) {
            server_selection.ended(last.wasWelcome(), last.movesTo());
        }
        JoinLink due = server_selection.due();
        if (due != reached) {
            transport.close();
            reach(due);
        }
    }

    private void reach(JoinLink server) {
        transport = transport(server, description.memoryBytes);
        reached = server;
    }

    private Chosen choose() throws KernelException {
        return KernelChoice.choose(kernels, listener::refused, random, System::nanoTime);
    }

    /** What runs graphs, if it does so exactly; null for none. */
    private OpenGraph exact(OpenGraph open) {
        if (open == null) {
            return null;
        }
        String problem;
        try {
            SelfTest.run(open);
            return open;
        } catch (GraphException error) {
            problem = error.getMessage();
        } catch (RuntimeException | LinkageError | OutOfMemoryError error) { // of a large library
            problem = error.toString();
        }
        listener.warned("this device only multiplies: " + problem);
        return null;
    }

    private void say(Notice now) {
        notice = now;
        if (now.state == State.PAUSED || now.state == State.ENDED) {
            forget(); // its owner has the memory back
        }
        listener.changed(now);
    }

    private void forget() {
        Session last = session;
        if (last != null) {
            last.forget();
        }
    }

    /** Tell the server how the device is. */
    private void report() {
        Session now = session;
        if (now == null || notice.state != State.WORKING) {
            return;
        }
        try {
            Map<String, Double> values = readings.allowed(sensors.read());
            if (!values.isEmpty()) {
                now.tell(values);
            }
        } catch (RuntimeException error) { // the owner's sensors, on somebody's phone
            listener.warned("the sensors cannot be read: " + error);
        }
    }

    private void close() {
        forget();
        Chosen last = chosen;
        if (last != null) {
            kernelThread.execute(last.kernel::close);
        }
        kernelThread.shutdown();
        timer.shutdownNow();
        transport.close();
    }

    /** No message that a server may send is larger than what it may fill, and a header. */
    static OkHttpTransport transport(JoinLink link, long memoryBytes) {
        long most = memoryBytes + Limits.MAX_HEADER_BYTES;
        return new OkHttpTransport(link.address, link.fingerprint, most);
    }

    private static Thread timerThread(Runnable task) {
        Thread thread = new Thread(task, "cleave-timer");
        thread.setDaemon(true);
        return thread;
    }

    private final class SessionEvents implements Session.Events {
        private final Chosen with;

        SessionEvents(Chosen with) {
            this.with = with;
        }

        @Override
        public void welcomed(Welcome welcome) {
            if (!welcome.credential.isEmpty()) {
                given = welcome.credential;
                try {
                    credentials.keep(welcome.server, link, welcome.credential);
                } catch (IOException error) {
                    listener.warned(
                            "the credential of this device cannot be kept (" + error.getMessage()
                                    + "): it will need a new join code next time");
                }
            }
            listener.welcomed(welcome);
            guest.welcomed();
        }

        @Override
        public void measured(LinkRates rates) {
            throw new IllegalStateException("this device did not ask for that");
        }

        @Override
        public void kernelLost(String reason) {
            listener.refused(with.kernel.name(), reason);
            kernels.removeIf(factory -> factory.name().equals(with.kernel.name()));
            chosen = null;
            kernelThread.execute(with.kernel::close);
        }
    }

    /** A visit that ends before it begins. */
    private static final class NoVisit implements Visit {
        private final Ending ending;

        NoVisit(Ending ending) {
            this.ending = ending;
        }

        @Override
        public Counts counts() {
            return Counts.NOTHING;
        }

        @Override
        public Ending run() {
            return ending;
        }

        @Override
        public void drain() {
            // Nothing is asked of it.
        }

        @Override
        public void leave(String reason) {
            // It is not there.
        }

        @Override
        public void drop(String reason) {
            // It is not there.
        }
    }
}
