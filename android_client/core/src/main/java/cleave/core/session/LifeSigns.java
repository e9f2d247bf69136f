package cleave.core.session;

import cleave.core.protocol.Limits;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.TimeUnit;
import java.util.function.LongSupplier;

/**
 * Signs of life of both ends of a connection. A server that was silent for long may have had
 * nothing to say, so it is asked for before it is given up.
 */
final class LifeSigns {
    private static final double NANOS_PER_S = 1e9;
    private static final double SHORTEST_S = 0.1;

    private final Transport transport;
    private final ScheduledExecutorService timer;
    private final LongSupplier nanos;
    private final Runnable beat;
    private final Runnable gone;
    private volatile long heardNanos; // when the server last gave one
    private volatile boolean asking;
    private ScheduledFuture<?> beating; // null before it begins

    /**
     * @param beat sends a sign of life, and returns at once
     * @param gone told that the server is not there any more
     */
    LifeSigns(
            Transport transport,
            ScheduledExecutorService timer,
            LongSupplier nanos,
            Runnable beat,
            Runnable gone) {
        this.transport = transport;
        this.timer = timer;
        this.nanos = nanos;
        this.beat = beat;
        this.gone = gone;
    }

    /** The server gave a sign of life. */
    void heard() {
        heardNanos = nanos.getAsLong();
    }

    /** @param heartbeatS the time after which the server may give this end up */
    void begin(double heartbeatS) {
        long everyNanos = (long) (Math.max(SHORTEST_S, heartbeatS / 2) * NANOS_PER_S);
        beating =
                timer.scheduleAtFixedRate(
                        this::look, everyNanos, everyNanos, TimeUnit.NANOSECONDS);
    }

    void end() {
        if (beating != null) {
            beating.cancel(false);
        }
    }

    private void look() {
        beat.run();
        long silentNanos = heardNanos;
        if (nanos.getAsLong() - silentNanos > Limits.SILENCE_S * NANOS_PER_S && !asking) {
            asking = true;
            transport.ask(there -> answered(there, silentNanos));
        }
    }

    private void answered(boolean there, long silentNanos) {
        asking = false;
        if (there) {
            heard();
        } else if (heardNanos == silentNanos) {
            gone.run();
        }
    }
}
