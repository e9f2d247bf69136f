package cleave.app;

import android.app.Activity;
import android.content.ActivityNotFoundException;
import android.content.Intent;
import android.net.Uri;
import android.view.View;
import android.view.WindowManager;
import android.widget.Button;
import android.widget.ProgressBar;
import android.widget.TextView;
import cleave.core.kernels.Chosen;
import cleave.core.kernels.Kernel;
import cleave.core.kernels.KernelChoice;
import cleave.core.kernels.KernelException;
import cleave.core.profile.Measurements;
import cleave.core.profile.Phone;
import cleave.core.profile.ProfileFile;
import cleave.core.profile.ProfileRun;
import java.io.IOException;
import java.io.OutputStream;
import java.nio.charset.StandardCharsets;
import java.text.SimpleDateFormat;
import java.util.Date;
import java.util.Locale;
import java.util.Random;
import java.util.function.BooleanSupplier;

/** "Measure this phone": in a thread of its own; its owner may share the profile. */
final class MeasurePanel {
    /** The request for a place to save the profile. */
    static final int SAVE = 1;

    private static final double SAMPLES_S = 60;
    private static final double SUSTAINED_S = 120;
    private static final int STEPS = 1000;

    private final Activity activity;
    private final Settings settings;
    private final BooleanSupplier working;
    private Phone phone; // the one that was measured
    private String profile;
    private volatile boolean stopped;
    private boolean running;

    /**
     * @param working whether the phone works for a server now
     */
    MeasurePanel(Activity activity, Settings settings, BooleanSupplier working) {
        this.activity = activity;
        this.settings = settings;
        this.working = working;
    }

    void bind() {
        progress().setMax(STEPS);
        button().setOnClickListener(view -> startOrStop());
        activity.findViewById(R.id.share).setOnClickListener(view -> share());
        activity.findViewById(R.id.save).setOnClickListener(view -> askWhereToSave());
    }

    /** Stop; what was measured so far is lost. */
    void stop() {
        stopped = true;
    }

    private void startOrStop() {
        if (running) {
            stop();
            return;
        }
        if (working.getAsBoolean()) {
            say(activity.getString(R.string.measure_busy));
            return;
        }
        stopped = false;
        show(true);
        ThisPhone described = new ThisPhone(activity, settings.policy());
        PhoneState state = new PhoneState(activity.getApplicationContext());
        // Like those that work: what is measured is what a server would get.
        ThisPhone.thread(() -> measureAndTell(described, state)).start();
    }

    private void measureAndTell(ThisPhone described, PhoneState state) {
        Phone measured = null;
        String text = null;
        String problem = null;
        try {
            measured = described.phone();
            Measurements found = measure(described, state);
            if (found != null) {
                String today = new SimpleDateFormat("yyyy-MM-dd", Locale.ROOT).format(new Date());
                text = ProfileFile.toml(measured, found, today, ThisPhone.version(activity));
            }
        } catch (KernelException error) {
            problem = error.getMessage();
        } catch (RuntimeException | OutOfMemoryError error) { // would end the app, and say nothing
            problem = error.toString();
        }
        done(measured, text, problem);
    }

    private Measurements measure(ThisPhone described, PhoneState state) throws KernelException {
        Chosen chosen =
                KernelChoice.choose(
                        described.kernels(), (name, why) -> {}, new Random(), System::nanoTime);
        Kernel kernel = chosen.kernel;
        try {
            return new ProfileRun(
                            kernel,
                            SAMPLES_S,
                            SUSTAINED_S,
                            System::nanoTime,
                            () -> state.battery().temperatureC,
                            this::progressed,
                            () -> stopped)
                    .run();
        } finally {
            kernel.close();
        }
    }

    private void progressed(double share) {
        int steps = (int) (STEPS * share);
        activity.runOnUiThread(() -> progress().setProgress(steps));
    }

    private void done(Phone measured, String text, String problem) {
        activity.runOnUiThread(
                () -> {
                    show(false);
                    if (text != null) {
                        phone = measured;
                        profile = text;
                        activity.findViewById(R.id.share).setVisibility(View.VISIBLE);
                        activity.findViewById(R.id.save).setVisibility(View.VISIBLE);
                        say(activity.getString(R.string.measure_done, phone.title));
                    } else if (problem != null) {
                        say(activity.getString(R.string.measure_failed, problem));
                    } else {
                        say(activity.getString(R.string.measure_about));
                    }
                });
    }

    private void show(boolean runs) {
        running = runs;
        button().setText(runs ? R.string.measure_stop : R.string.measure);
        progress().setVisibility(runs ? View.VISIBLE : View.GONE);
        progress().setProgress(0);
        if (runs) {
            activity.getWindow().addFlags(WindowManager.LayoutParams.FLAG_KEEP_SCREEN_ON);
        } else {
            activity.getWindow().clearFlags(WindowManager.LayoutParams.FLAG_KEEP_SCREEN_ON);
        }
    }

    private void share() {
        Intent send =
                new Intent(Intent.ACTION_SEND)
                        .setType("text/plain")
                        .putExtra(Intent.EXTRA_SUBJECT, fileName())
                        .putExtra(Intent.EXTRA_TEXT, profile);
        activity.startActivity(Intent.createChooser(send, null));
    }

    private void askWhereToSave() {
        Intent create =
                new Intent(Intent.ACTION_CREATE_DOCUMENT)
                        .addCategory(Intent.CATEGORY_OPENABLE)
                        .setType("application/octet-stream") // of text the name would end with .txt
                        .putExtra(Intent.EXTRA_TITLE, fileName());
        try {
            activity.startActivityForResult(create, SAVE);
        } catch (ActivityNotFoundException error) {
            say(activity.getString(R.string.not_saved, error.getMessage()));
        }
    }

    /**
     * What the owner chose, of what this panel asked.
     *
     * @param place null for none
     */
    void chosen(Uri place) {
        if (place == null || profile == null) { // the system may have ended the app meanwhile
            return;
        }
        try (OutputStream out = activity.getContentResolver().openOutputStream(place)) {
            if (out == null) {
                throw new IOException("the place cannot be written to");
            }
            out.write(profile.getBytes(StandardCharsets.UTF_8));
            say(activity.getString(R.string.saved, fileName()));
        } catch (IOException | RuntimeException error) { // of whoever keeps files there
            say(activity.getString(R.string.not_saved, error.getMessage()));
        }
    }

    private String fileName() {
        return ProfileFile.name(phone) + ".toml";
    }

    private void say(String text) {
        TextView label = activity.findViewById(R.id.measured);
        label.setText(text);
    }

    private Button button() {
        return activity.findViewById(R.id.measure);
    }

    private ProgressBar progress() {
        return activity.findViewById(R.id.measuring);
    }
}
