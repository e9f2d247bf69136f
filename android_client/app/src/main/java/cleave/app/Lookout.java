package cleave.app;

import android.os.SystemClock;
import cleave.core.Verdict;
import cleave.core.policy.Gate;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.ScheduledThreadPoolExecutor;
import java.util.concurrent.ThreadPoolExecutor;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;

/** Looks at the phone every few seconds, and says whether it may work. In a thread of its own. */
final class Lookout {
    private static final long LOOK_S = 5;

    /** What comes after its end is of no interest. */
    private final ScheduledThreadPoolExecutor thread =
            new ScheduledThreadPoolExecutor(1, new ThreadPoolExecutor.DiscardPolicy());

    private final PhoneState state;
    private final Settings settings;
    private final String pausedReason;
    private ScheduledFuture<?> looks; // used by the main thread alone, all below by `thread`
    private Consumer<Verdict> tell;
    private Gate gate;
    private boolean pausedByOwner;

    /**
     * @param pausedReason what is said while the owner has it paused
     */
    Lookout(PhoneState state, Settings settings, String pausedReason) {
        this.state = state;
        this.settings = settings;
        this.pausedReason = pausedReason;
    }

    /**
     * Look now and from now on.
     *
     * @param paused whether its owner has it paused
     * @param whoWantsToKnow told what was seen, every time
     * @param then called once after the first look
     */
    void begin(boolean paused, Consumer<Verdict> whoWantsToKnow, Runnable then) {
        thread.execute(
                () -> {
                    tell = whoWantsToKnow;
                    gate = new Gate(settings.policy(), SystemClock::elapsedRealtimeNanos);
                    pausedByOwner = paused;
                    lookNow();
                    then.run();
                });
        looks = thread.scheduleWithFixedDelay(this::lookNow, LOOK_S, LOOK_S, TimeUnit.SECONDS);
    }

    void end() {
        looks.cancel(false);
        thread.execute(() -> tell = null);
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
