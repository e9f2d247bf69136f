package cleave.app;

import android.app.Service;
import android.content.BroadcastReceiver;
import android.content.Context;
import android.content.Intent;
import android.content.IntentFilter;
import android.net.ConnectivityManager;
import android.net.Network;
import android.os.Binder;
import android.os.Build;
import android.os.Handler;
import android.os.IBinder;
import android.os.Looper;
import cleave.core.Device;
import cleave.core.DeviceListener;
import cleave.core.InvalidLinkException;
import cleave.core.JoinLink;
import cleave.core.kernels.Chosen;
import cleave.core.policy.DataMeter;
import cleave.core.policy.Telemetry;
import cleave.core.session.Counts;
import cleave.core.session.End;
import cleave.core.session.Notice;
import cleave.core.session.State;
import cleave.core.session.Welcome;

/**
 * Keeps the phone joined to a server while the app is not in front. Everything here happens in the
 * main thread; what the device tells comes to it.
 */
public final class DeviceService extends Service implements DeviceListener {
    static final String START = "cleave.app.START";
    static final String PAUSE = "cleave.app.PAUSE";
    static final String RESUME = "cleave.app.RESUME";
    static final String STOP = "cleave.app.STOP";
    static final String LOOK = "cleave.app.LOOK";

    private static final String LINK = "link";
    private static final int ANDROID_8 = 26;

    private final Handler main = new Handler(Looper.getMainLooper());
    private final BroadcastReceiver plugged =
            new BroadcastReceiver() {
                @Override
                public void onReceive(Context context, Intent intent) {
                    awake.forAMoment(Awake.SETTLE_MS);
                    lookout.look();
                }
            };

    private final ConnectivityManager.NetworkCallback network =
            new ConnectivityManager.NetworkCallback() {
                @Override
                public void onAvailable(Network found) {
                    main.post(DeviceService.this::online);
                }

                @Override
                public void onLost(Network lost) {
                    main.post(DeviceService.this::offline);
                }
            };

    private ConnectivityManager networks;
    private StatusNotification notification;
    private Words words;
    private Servers servers;
    private Lookout lookout;
    private Awake awake;
    private Telemetry telemetry;
    private DataMeter data;
    private Device device; // null: not joined
    private JoinLink link; // of the device, or of the last one
    private Notice notice; // the latest, also of a device that is gone
    private String kernel = "";
    private String problem = "";
    private boolean pausedByOwner;
    private boolean leaving; // as its owner wishes
    private int latestStart; // of those that came: one that is on its way is not to be stopped

    /** For the activity, which is in the same process. */
    final class Here extends Binder {
        DeviceService service() {
            return DeviceService.this;
        }
    }

    /**
     * Join a server.
     *
     * @param text a join link that its owner agreed to; null for the last server
     */
    static void start(Context context, String text) {
        Intent intent =
                new Intent(context, DeviceService.class).setAction(START).putExtra(LINK, text);
        if (Build.VERSION.SDK_INT >= ANDROID_8) {
            context.startForegroundService(intent);
        } else {
            context.startService(intent);
        }
    }

    @Override
    public void onCreate() {
        notification = new StatusNotification(this);
        words = new Words(getResources());
        servers = new Servers(this);
        awake = new Awake(this);
        networks = getSystemService(ConnectivityManager.class);
        PhoneState state = new PhoneState(this);
        telemetry = new Telemetry(state::battery, state::throttling, System::nanoTime);
        Settings settings = new Settings(this);
        data = settings.dataMeter();
        lookout = new Lookout(state, settings, data, getString(R.string.reason_you));
    }

    @Override
    public IBinder onBind(Intent intent) {
        return new Here();
    }

    /** The system may end the process and start it again, then without an intent. */
    @Override
    public int onStartCommand(Intent intent, int flags, int startId) {
        latestStart = startId;
        String action = intent == null ? START : intent.getAction();
        boolean bySystem = intent == null || LOOK.equals(action); // an alarm outlives the process
        if (device == null && bySystem && servers.isWorking()) {
            join(null, servers.isPaused());
        } else if (device == null && !bySystem && START.equals(action)) {
            join(intent.getStringExtra(LINK), false);
        } else if (device == null) {
            stopSelf(latestStart);
        } else if (PAUSE.equals(action)) {
            setPausedByOwner(true);
        } else if (RESUME.equals(action)) {
            setPausedByOwner(false);
        } else if (LOOK.equals(action)) {
            awake.forAMoment(Awake.LOOK_MS);
            lookout.look();
            device.online(); // if it waits for its server, this is the next try
        } else if (STOP.equals(action)) {
            leave();
        }
        return START_STICKY;
    }

    @Override
    public void onDestroy() {
        if (device != null) {
            device.stop();
            end();
            if (leaving) {
                servers.end(false);
            } // else the system may start it again
        }
        lookout.close();
    }

    boolean isJoined() {
        return device != null;
    }

    boolean isPausedByOwner() {
        return pausedByOwner;
    }

    void setPausedByOwner(boolean paused) {
        pausedByOwner = paused;
        servers.setPaused(paused);
        lookout.setPausedByOwner(paused);
        show();
    }

    /** Leave the server once what it gave is answered. */
    void leave() {
        if (device != null) {
            leaving = true;
            device.stop();
        }
    }

    /** The owner changed the conditions. */
    void conditionsChanged() {
        lookout.conditionsChanged();
    }

    /** What it does, and why; empty before it did anything. */
    String line() {
        if (notice == null) {
            return "";
        }
        return words.state(notice, device == null ? link.host : device.host());
    }

    /** What it did, and with what. */
    String details() {
        Counts counts = device == null ? Counts.NOTHING : device.counts();
        StringBuilder lines = new StringBuilder();
        if (device != null && counts.blocks > 0) {
            lines.append(words.counts(counts)).append('\n');
            String use = words.dataUse(data.bytesPerS());
            lines.append(use).append(use.isEmpty() ? "" : "\n");
        }
        return lines.append(kernel).append(problem).toString();
    }

    // --- What the device tells, from its threads.

    @Override
    public void changed(Notice told) {
        main.post(
                () -> {
                    if (device == null) {
                        return; // the system ended the service meanwhile
                    }
                    notice = told;
                    awake.keep(told);
                    if (told.state == State.ENDED) {
                        end();
                        servers.end(told.end == End.REFUSED);
                        if (!leaving) {
                            notification.tell(line());
                        }
                        stopSelf(latestStart);
                    } else {
                        show();
                    }
                });
    }

    @Override
    public void welcomed(Welcome welcome) {
        telemetry.restart();
        main.post(() -> servers.remember(link));
    }

    @Override
    public void chose(Chosen chosen) {
        String text =
                getString(
                        R.string.kernel,
                        chosen.kernel.name() + " (" + chosen.kernel.about() + ")",
                        Words.quantity(chosen.flopsPerS, "FLOP/s"));
        main.post(() -> kernel = text);
    }

    @Override
    public void refused(String name, String reason) {
        String text = "\n" + getString(R.string.kernel_refused, name, reason);
        main.post(() -> problem = text);
    }

    @Override
    public void warned(String text) {
        main.post(() -> problem = "\n" + text);
    }

    // --- In the main thread.

    /**
     * @param text a join link that its owner agreed to; null for the last server
     * @param paused whether the owner had paused it
     */
    private void join(String text, boolean paused) {
        try {
            notification.begin(getString(R.string.state_starting));
        } catch (IllegalStateException error) { // Android 12 and newer: not from the background
            notification.tell(getString(R.string.not_resumed));
            stopSelf(latestStart);
            return;
        }
        try {
            link = text == null ? servers.last() : JoinLink.parse(text);
        } catch (InvalidLinkException error) {
            throw new IllegalStateException("a link that its owner agreed to is none", error);
        }
        if (link == null) {
            stopForeground(STOP_FOREGROUND_REMOVE);
            stopSelf(latestStart);
            return;
        }
        servers.begin(text);
        servers.setPaused(paused);
        kernel = "";
        problem = "";
        pausedByOwner = paused;
        leaving = false;
        ThisPhone phone = new ThisPhone(this, new Settings(this).policy());
        device =
                new Device(
                        link,
                        phone.description(),
                        phone.kernels(),
                        servers.credentials(),
                        telemetry,
                        this,
                        ThisPhone::thread,
                        phone.graphs());
        IntentFilter plugs = new IntentFilter(Intent.ACTION_POWER_CONNECTED);
        plugs.addAction(Intent.ACTION_POWER_DISCONNECTED);
        registerReceiver(plugged, plugs);
        networks.registerDefaultNetworkCallback(network);
        Thread working = new Thread(device, "device");
        lookout.begin(paused, device::counts, device::allow, working::start);
    }

    private void online() {
        lookout.look();
        if (device != null) {
            awake.forAMoment(Awake.SETTLE_MS);
            device.online();
        }
    }

    private void offline() {
        lookout.look();
        if (device != null) {
            device.offline();
        }
    }

    private void end() {
        lookout.end();
        unregisterReceiver(plugged);
        networks.unregisterNetworkCallback(network);
        device = null;
        awake.release();
        stopForeground(STOP_FOREGROUND_REMOVE);
    }

    private void show() {
        if (device != null) {
            notification.update(line(), pausedByOwner);
        }
    }
}
