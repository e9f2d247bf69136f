package cleave.app;

import cleave.core.Verdict;
import cleave.core.policy.Gate;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;

/** Looks at the phone every few seconds, and says whether it may work. In a thread of its own. */
final class Lookout {
    private static final long LOOK_S = 5;

    private final ScheduledExecutorService thread = Executors.newSingleThreadScheduledExecutor();
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

    /** Look now and from now on. */
    void begin(Consumer<Verdict> whoWantsToKnow) {
        thread.execute(
                () -> {
                    tell = whoWantsToKnow;
                    gate = new Gate(settings.policy());
                    pausedByOwner = false;
                });
        looks = thread.scheduleWithFixedDelay(this::lookNow, 0, LOOK_S, TimeUnit.SECONDS);
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
                    gate = new Gate(settings.policy());
                    lookNow();
                });
    }

    private void lookNow() {
        if (tell != null) {
            Verdict seen = gate.decide(state.observe());
            tell.accept(pausedByOwner ? Verdict.pause(pausedReason) : seen);
        }
    }
}
