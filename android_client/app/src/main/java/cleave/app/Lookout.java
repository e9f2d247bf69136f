package cleave.app;

import android.os.SystemClock;
import cleave.core.Verdict;
import cleave.core.policy.DataMeter;
import cleave.core.policy.Gate;
import cleave.core.session.Counts;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.ScheduledThreadPoolExecutor;
import java.util.concurrent.ThreadPoolExecutor;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;
import java.util.function.Supplier;

/** Looks at the phone every few seconds, and says whether it may work. In a thread of its own. */
final class Lookout {
    private static final long LOOK_S = 5;

    /** What comes after its end is of no interest. */
    private final ScheduledThreadPoolExecutor thread =
            new ScheduledThreadPoolExecutor(1, new ThreadPoolExecutor.DiscardPolicy());

    private final PhoneState state;
    private final Settings settings;
    private final DataMeter data;
    private final String pausedReason;
    private ScheduledFuture<?> looks; // used by the main thread alone, all below by `thread`
    private Consumer<Verdict> tell;
    private Supplier<Counts> counts;
    private Gate gate;
    private boolean pausedByOwner;

    /**
     * @param data counts what the device sends and receives
     * @param pausedReason what is said while the owner has it paused
     */
    Lookout(PhoneState state, Settings settings, DataMeter data, String pausedReason) {
        this.state = state;
        this.settings = settings;
        this.data = data;
        this.pausedReason = pausedReason;
    }

    /**
     * Look now and from now on.
     *
     * @param paused whether its owner has it paused
     * @param device the counters of a device that begins now
     * @param whoWantsToKnow told what was seen, every time
     * @param then called once after the first look
     */
    void begin(
            boolean paused,
            Supplier<Counts> device,
            Consumer<Verdict> whoWantsToKnow,
            Runnable then) {
        thread.execute(
                () -> {
                    tell = whoWantsToKnow;
                    counts = device;
                    data.begin();
                    gate =
                            new Gate(
                                    settings.policy(),
                                    SystemClock::elapsedRealtimeNanos,
                                    data::used);
                    pausedByOwner = paused;
                    lookNow();
                    then.run();
                });
        looks = thread.scheduleWithFixedDelay(this::lookNow, LOOK_S, LOOK_S, TimeUnit.SECONDS);
    }

    void end() {
        looks.cancel(false);
        thread.execute(
                () -> {
                    data.count(counts.get());
                    tell = null;
                });
    }

    void close() {
        thread.shutdown();
    }

    void look() {
        thread.execute(this::lookNow);
    }

    void setPausedByOwner(boolean paused) {
        thread.execute(
                () -> {
                    pausedByOwner = paused;
                    lookNow();
                });
    }

    void conditionsChanged() {
        thread.execute(
                () -> {
                    gate.setPolicy(settings.policy());
                    lookNow();
                });
    }

    private void lookNow() {
        if (tell != null) {
            data.count(counts.get());
            tell.accept(pausedByOwner ? Verdict.pause(pausedReason) : seen());
        }
    }

    /** What cannot be seen does not allow anything. */
    private Verdict seen() {
        try {
            return gate.decide(state.observe());
        } catch (RuntimeException error) { // of the system, on somebody's phone
            return Verdict.pause("the phone's state cannot be read (" + error + ")");
        }
    }
}
