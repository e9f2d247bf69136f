package cleave.core.session;

import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;
import java.util.function.DoubleSupplier;
import java.util.function.LongSupplier;

/**
 * A guest on somebody's phone: joins while it may, drains when it may not, and comes back.
 *
 * <p>{@code run} takes a thread; everything else may be called from any other.
 */
public final class Guest {
    /** How long answering may take; what is missing then goes to other devices. */
    public static final double DRAIN_S = 30;

    /** The longest wait between two tries. */
    public static final double LONGEST_WAIT_S = 60;

    /** A session that lasted this long was a success: waits start from a second again. */
    public static final double STEADY_S = 60;

    private static final double NANOS_PER_S = 1e9;

    /** Opens sessions. */
    public interface Connector {
        /** A new session, not yet run; it calls {@link Guest#welcomed}. */
        Visit connect() throws InterruptedException;
    }

    private final Connector connector;
    private final Consumer<Notice> say;
    private final ScheduledExecutorService timer;
    private final LongSupplier nanos;
    private final DoubleSupplier random;
    private final Object lock = new Object();
    private Visit visit;
    private Counts done = Counts.NOTHING; // by sessions that are over
    private String pausedFor; // null: it may work
    private boolean stopping;
    private boolean drained; // whether we asked the session to end
    private boolean wanted; // whether a wait is to end
    private boolean wasWelcome; // whether any session was
    private int failures;
    private Notice notice = new Notice(State.CONNECTING, "");

    /**
     * @param say told of every change; it must not call back
     * @param nanos a clock that never goes back
     * @param random numbers from 0 to 1
     */
    public Guest(
            Connector connector,
            Consumer<Notice> say,
            ScheduledExecutorService timer,
            LongSupplier nanos,
            DoubleSupplier random) {
        this.connector = connector;
        this.say = say;
        this.timer = timer;
        this.nanos = nanos;
        this.random = random;
    }

    /**
     * Seconds until the next try: between half of 1, 2, 4, ... 60 and the whole, so that a fleet
     * does not come back all at once.
     *
     * @param failures so far, since the last success
     * @param random from 0 to 1
     */
    public static double waitS(int failures, double random) {
        double longestS = Math.min(LONGEST_WAIT_S, 1 << Math.min(failures, 10));
        return longestS * (0.5 + 0.5 * random);
    }

    /** The latest of what it said. */
    public Notice notice() {
        synchronized (lock) {
            return notice;
        }
    }

    /** All that it did. */
    public Counts counts() {
        synchronized (lock) {
            return visit == null ? done : done.plus(visit.counts());
        }
    }

    /** Be a guest until it is stopped, refused for good, or the server is done with it. */
    public void run() throws InterruptedException {
        while (true) {
            String paused;
            synchronized (lock) {
                if (stopping) {
                    say(State.ENDED, "stopped");
                    return;
                }
                paused = pausedFor;
                if (paused != null) {
                    say(State.PAUSED, paused);
                    await(0);
                    continue;
                }
            }
            long beganNanos = nanos.getAsLong();
            Ending ending = visit();
            synchronized (lock) {
                if (stopping || pausedFor != null || drained) {
                    continue;
                }
                boolean mistaken = ending.end == End.STRANGER && !wasWelcome;
                if (ending.isForGood || mistaken) {
                    say(new Notice(State.ENDED, ending, 0));
                    return;
                }
                if (nanos.getAsLong() - beganNanos >= STEADY_S * NANOS_PER_S) {
                    failures = 0;
                }
                double seconds = ending.backS + waitS(failures, random.getAsDouble());
                failures += 1;
                say(new Notice(State.WAITING, ending, seconds));
                await(seconds);
            }
        }
    }

    /** The server has welcomed the session. */
    public void welcomed() {
        synchronized (lock) {
            wasWelcome = true;
            if (visit != null && !drained) {
                say(State.WORKING, "");
            }
        }
    }

    /**
     * The owner's conditions do not allow work; drain, and wait for {@code resume}.
     *
     * @param reason shown; that of a later call replaces it
     */
    public void pause(String reason) {
        synchronized (lock) {
            if (stopping || reason.equals(pausedFor)) {
                return;
            }
            if (pausedFor == null) {
                drain(reason);
            }
            pausedFor = reason;
            wake();
        }
    }

    /** They allow it again. */
    public void resume() {
        synchronized (lock) {
            pausedFor = null;
            wake();
        }
    }

    /** Drain and end; a second time, end at once. */
    public void stop() {
        synchronized (lock) {
            if (!stopping) {
                stopping = true;
                drain("stopping");
            } else if (visit != null) {
                visit.leave("stopped");
            }
            wake();
        }
    }

    /** The network is gone. */
    public void offline() {
        synchronized (lock) {
            if (visit != null) {
                visit.drop("the network is gone");
            }
        }
    }

    /** There is a network again: do not wait any longer. */
    public void online() {
        synchronized (lock) {
            if (notice.state == State.WAITING) {
                wake();
            }
        }
    }

    private Ending visit() throws InterruptedException {
        synchronized (lock) {
            drained = false;
            say(State.CONNECTING, "");
        }
        Visit session = connector.connect();
        synchronized (lock) {
            visit = session;
            if (stopping || pausedFor != null) {
                session.leave("not now");
            }
        }
        try {
            return session.run();
        } finally {
            synchronized (lock) {
                done = done.plus(session.counts());
                visit = null;
            }
        }
    }

    private void drain(String reason) {
        Visit session = visit;
        if (session == null) {
            return;
        }
        drained = true;
        if (notice.state == State.WORKING) {
            say(State.DRAINING, reason);
        }
        session.drain();
        timer.schedule(
                () -> session.leave(reason), (long) (DRAIN_S * NANOS_PER_S), TimeUnit.NANOSECONDS);
    }

    private void say(State state, String reason) {
        say(new Notice(state, reason));
    }

    private void say(Notice now) {
        notice = now;
        say.accept(now);
    }

    private void wake() {
        wanted = true;
        lock.notifyAll();
    }

    /** Until something changes, or so many seconds have passed; 0 for no end. */
    private void await(double seconds) throws InterruptedException {
        wanted = false; // whoever woke us before has changed what was just looked at
        long endNanos = nanos.getAsLong() + (long) (seconds * NANOS_PER_S);
        while (!wanted) {
            long leftMs = (endNanos - nanos.getAsLong() + 999_999) / 1_000_000;
            if (seconds > 0 && leftMs <= 0) {
                break;
            }
            lock.wait(seconds > 0 ? leftMs : 0);
        }
    }
}
