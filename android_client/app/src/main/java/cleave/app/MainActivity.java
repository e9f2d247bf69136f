package cleave.app;

import android.Manifest;
import android.app.Activity;
import android.content.ComponentName;
import android.content.Context;
import android.content.Intent;
import android.content.ServiceConnection;
import android.content.pm.PackageManager;
import android.net.Uri;
import android.os.Build;
import android.os.Bundle;
import android.os.Handler;
import android.os.IBinder;
import android.os.Looper;
import android.view.View;
import android.widget.Button;
import android.widget.EditText;
import android.widget.TextView;
import android.widget.Toast;
import cleave.core.InvalidLinkException;
import cleave.core.JoinLink;
import java.io.IOException;

/** The app's one screen: join, watch, pause and stop; conditions; measuring. */
public final class MainActivity extends Activity {
    private static final int ANDROID_13 = 33;
    private static final long REFRESH_MS = 1000;

    private final Handler main = new Handler(Looper.getMainLooper());
    private final Runnable refresh = this::refreshAndGoOn;
    private final ServiceConnection connection =
            new ServiceConnection() {
                @Override
                public void onServiceConnected(ComponentName name, IBinder binder) {
                    service = ((DeviceService.Here) binder).service();
                    show();
                    askWhenBound();
                }

                @Override
                public void onServiceDisconnected(ComponentName name) {
                    service = null;
                }
            };

    private Servers servers;
    private ConsentDialog consent;
    private SettingsPanel conditions;
    private MeasurePanel measuring;
    private DeviceService service; // null while not bound: then nobody knows if it is joined
    private Boolean forgettable; // whether there is anything to forget; null: not looked yet
    private String linkToAsk; // for, once that is known; null: none

    @Override
    protected void onCreate(Bundle state) {
        super.onCreate(state);
        setContentView(R.layout.main);
        servers = new Servers(this);
        consent = new ConsentDialog(this);
        Settings settings = new Settings(this);
        conditions = new SettingsPanel(this, settings, this::conditionsChanged);
        conditions.bind();
        measuring = new MeasurePanel(this, settings, this::isJoined);
        measuring.bind();
        onClick(R.id.join, () -> ask(url().getText().toString()));
        onClick(R.id.rejoin, () -> whenBound(this::rejoin));
        onClick(
                R.id.pause,
                () -> whenBound(() -> service.setPausedByOwner(!service.isPausedByOwner())));
        onClick(R.id.stop, () -> whenBound(() -> service.leave()));
        onClick(R.id.forget, this::forget);
        if (state == null) {
            askForLinkOf(getIntent());
        }
    }

    /** A link was opened while the app is there. */
    @Override
    protected void onNewIntent(Intent intent) {
        super.onNewIntent(intent);
        askForLinkOf(intent);
    }

    @Override
    protected void onStart() {
        super.onStart();
        bindService(new Intent(this, DeviceService.class), connection, Context.BIND_AUTO_CREATE);
        refreshAndGoOn();
    }

    @Override
    protected void onStop() {
        conditions.keep();
        measuring.stop(); // behind other apps it would measure them
        main.removeCallbacks(refresh);
        unbindService(connection);
        service = null;
        super.onStop();
    }

    @Override
    protected void onDestroy() {
        consent.dismiss();
        super.onDestroy();
    }

    @Override
    protected void onActivityResult(int request, int result, Intent data) {
        super.onActivityResult(request, result, data);
        if (request == MeasurePanel.SAVE && result == RESULT_OK && data != null) {
            measuring.chosen(data.getData());
        }
    }

    private boolean isJoined() {
        return service != null && service.isJoined();
    }

    private void conditionsChanged() {
        if (isJoined()) {
            service.conditionsChanged();
        }
    }

    private void askForLinkOf(Intent intent) {
        Uri link = intent.getData();
        boolean again = (intent.getFlags() & Intent.FLAG_ACTIVITY_LAUNCHED_FROM_HISTORY) != 0;
        if (link != null && !again) {
            ask(link.toString());
        }
    }

    /** Shows the owner what joining means, and joins if that is agreed to. */
    private void ask(String text) {
        linkToAsk = text;
        askWhenBound();
    }

    private void askWhenBound() {
        if (service != null && linkToAsk != null) {
            String text = linkToAsk;
            linkToAsk = null;
            askNow(text);
        }
    }

    private void askNow(String text) {
        if (service.isJoined()) {
            Toast.makeText(this, R.string.already_joined, Toast.LENGTH_LONG).show();
            return;
        }
        try {
            JoinLink link = JoinLink.parse(text);
            url().setError(null);
            consent.ask(link, () -> join(text));
        } catch (InvalidLinkException error) {
            url().setError(error.getMessage());
            url().requestFocus();
        }
    }

    /** The same server as last time, which its owner agreed to then. */
    private void rejoin() {
        if (!service.isJoined()) {
            join(null);
        }
    }

    private void join(String text) {
        measuring.stop();
        askForNotification();
        url().setText("");
        DeviceService.start(this, text);
    }

    /** Without it the app works as well, and its notification is in the task manager alone. */
    private void askForNotification() {
        if (Build.VERSION.SDK_INT >= ANDROID_13
                && checkSelfPermission(Manifest.permission.POST_NOTIFICATIONS)
                        != PackageManager.PERMISSION_GRANTED) {
            requestPermissions(new String[] {Manifest.permission.POST_NOTIFICATIONS}, 0);
        }
    }

    private void forget() {
        String said = getString(R.string.forgotten);
        try {
            servers.forget();
        } catch (IOException error) {
            said = error.getMessage();
        }
        Toast.makeText(this, said, Toast.LENGTH_LONG).show();
        forgettable = null;
        show();
    }

    private void refreshAndGoOn() {
        show();
        main.postDelayed(refresh, REFRESH_MS);
    }

    /** Until the service is bound, in a moment, all stays as it was. */
    private void show() {
        whenBound(this::showService);
    }

    private void showService() {
        boolean joined = service.isJoined();
        String line = service.line();
        setText(R.id.state, line.isEmpty() ? getString(R.string.state_none) : line);
        setText(R.id.details, service.details());
        setVisible(R.id.working, joined);
        setVisible(R.id.joining, !joined);
        if (joined) {
            forgettable = null;
            Button pause = findViewById(R.id.pause);
            pause.setText(service.isPausedByOwner() ? R.string.resume : R.string.pause);
        } else {
            JoinLink last = servers.last();
            setVisible(R.id.rejoin, last != null);
            if (forgettable == null) {
                forgettable = servers.any(); // of files: not every second
            }
            setVisible(R.id.forget, forgettable);
            if (last != null) {
                Button rejoin = findViewById(R.id.rejoin);
                rejoin.setText(getString(R.string.rejoin, last.host));
            }
        }
    }

    /** Only when it is another text, or a screen reader says it again every second. */
    private void setText(int id, String text) {
        TextView view = findViewById(id);
        if (!text.contentEquals(view.getText())) {
            view.setText(text);
        }
    }

    private void setVisible(int id, boolean visible) {
        findViewById(id).setVisibility(visible ? View.VISIBLE : View.GONE);
    }

    private void whenBound(Runnable action) {
        if (service != null) {
            action.run();
        }
    }

    private void onClick(int id, Runnable action) {
        findViewById(id).setOnClickListener(view -> action.run());
    }

    private EditText url() {
        return findViewById(R.id.url);
    }
}
