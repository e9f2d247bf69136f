package cleave.app;

import android.app.AlarmManager;
import android.app.PendingIntent;
import android.content.Context;
import android.content.Intent;
import android.os.PowerManager;
import android.os.SystemClock;
import cleave.core.policy.Gate;
import cleave.core.session.Notice;
import cleave.core.session.State;

/** Keeps the processor awake while the phone works, and wakes it now and then while it does not. */
final class Awake {
    /** To look once. */
    static final long LOOK_MS = 10_000;

    /** To look until a charger or Wi-Fi that is there again counts. */
    static final long SETTLE_MS = (long) (1000 * Gate.STEADY_S) + LOOK_MS;

    private static final long WAKE_AGAIN_MS = 15 * 60_000;

    private final AlarmManager alarms;
    private final PowerManager.WakeLock lock;
    private final PendingIntent looks;
    private boolean working; // and so the lock is held without an end

    Awake(Context context) {
        alarms = context.getSystemService(AlarmManager.class);
        lock =
                context.getSystemService(PowerManager.class)
                        .newWakeLock(PowerManager.PARTIAL_WAKE_LOCK, "cleave:working");
        lock.setReferenceCounted(false);
        Intent look = new Intent(context, DeviceService.class).setAction(DeviceService.LOOK);
        looks = PendingIntent.getService(context, 0, look, PendingIntent.FLAG_IMMUTABLE);
    }

    /** What the device does now: while it is paused, or its server is away for long, all sleeps. */
    void keep(Notice notice) {
        if (notice.state == State.PAUSED || notice.waitsLong()) {
            if (working) { // else the lock is held for a moment at most, which is to be over first
                release();
            }
            wakeAgain();
        } else if (notice.state != State.ENDED) {
            working = true;
            lock.acquire(); // also when it is held: that may be for a moment only
        }
    }

    /** Long enough to look whether it may work again; then it sleeps on. */
    void forAMoment(long momentMs) {
        if (!lock.isHeld()) {
            lock.acquire(momentMs);
            wakeAgain();
        }
    }

    void release() {
        working = false;
        alarms.cancel(looks);
        if (lock.isHeld()) {
            lock.release();
        }
    }

    private void wakeAgain() {
        long at = SystemClock.elapsedRealtime() + WAKE_AGAIN_MS;
        alarms.setAndAllowWhileIdle(AlarmManager.ELAPSED_REALTIME_WAKEUP, at, looks);
    }
}
