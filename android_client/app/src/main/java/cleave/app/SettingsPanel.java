package cleave.app;

import android.app.Activity;
import android.widget.EditText;
import android.widget.SeekBar;
import android.widget.Switch;
import android.widget.TextView;
import java.util.function.Consumer;
import java.util.function.IntConsumer;
import java.util.function.IntFunction;
import java.util.function.Supplier;

/** Where the owner says when the phone works, and with how much of it. */
final class SettingsPanel {
    private final Activity activity;
    private final Settings settings;
    private final Runnable changed;

    /**
     * @param changed called after every change
     */
    SettingsPanel(Activity activity, Settings settings, Runnable changed) {
        this.activity = activity;
        this.settings = settings;
        this.changed = changed;
    }

    /** Show the settings, and keep what is changed from now on. */
    void bind() {
        Switch charging = activity.findViewById(R.id.when_charging);
        charging.setChecked(settings.whenCharging());
        charging.setOnCheckedChangeListener(
                (button, on) -> {
                    settings.setWhenCharging(on);
                    changed.run();
                });
        Switch wifi = activity.findViewById(R.id.on_wifi);
        wifi.setChecked(settings.onWifi());
        wifi.setOnCheckedChangeListener(
                (button, on) -> {
                    settings.setOnWifi(on);
                    changed.run();
                });
        bind(R.id.hours, settings::hours, settings::setHours);
        bind(R.id.data_cap, settings::dataCap, settings::setDataCap);
        slide(
                R.id.temperature,
                R.id.temperature_label,
                new int[] {Settings.COOLEST_C, Settings.HOTTEST_C, settings.temperatureC()},
                settings::setTemperatureC,
                degrees -> activity.getString(R.string.temperature, degrees));
        int cores = ThisPhone.cores();
        slide(
                R.id.cores,
                R.id.cores_label,
                new int[] {Settings.LEAST_CORES_PERCENT, 100, settings.coresPercent()},
                settings::setCoresPercent,
                percent ->
                        activity.getString(
                                R.string.cores, percent, settings.policy().threads(cores), cores));
        slide(
                R.id.memory,
                R.id.memory_label,
                new int[] {
                    Settings.LEAST_MEMORY_PERCENT,
                    Settings.MOST_MEMORY_PERCENT,
                    settings.memoryPercent()
                },
                settings::setMemoryPercent,
                percent -> activity.getString(R.string.memory, percent, memory()));
    }

    private String memory() {
        return Words.quantity(settings.policy().memoryBytes(ThisPhone.appMemoryBytes()), "B");
    }

    /** A field whose text is kept when it is left or done with. */
    private void bind(int field, Supplier<String> kept, Consumer<String> keep) {
        EditText edited = activity.findViewById(field);
        edited.setText(kept.get());
        edited.setOnFocusChangeListener(
                (view, focused) -> {
                    if (!focused) {
                        keep(edited, kept, keep);
                    }
                });
        edited.setOnEditorActionListener(
                (view, action, event) -> {
                    keep(edited, kept, keep);
                    return false;
                });
    }

    /** What is written and not yet kept. */
    void keep() {
        keep(activity.findViewById(R.id.hours), settings::hours, settings::setHours);
        keep(activity.findViewById(R.id.data_cap), settings::dataCap, settings::setDataCap);
    }

    private void keep(EditText edited, Supplier<String> kept, Consumer<String> keep) {
        String text = edited.getText().toString();
        if (text.equals(kept.get())) {
            return;
        }
        try {
            keep.accept(text);
            edited.setError(null);
            changed.run();
        } catch (IllegalArgumentException error) {
            edited.setError(error.getMessage());
        }
    }

    /** A slider from range[0] to range[1], at range[2], whose label says what it stands for. */
    private void slide(
            int slider, int label, int[] range, IntConsumer keep, IntFunction<String> text) {
        SeekBar bar = activity.findViewById(slider);
        TextView says = activity.findViewById(label);
        bar.setMax(range[1] - range[0]);
        bar.setProgress(range[2] - range[0]);
        says.setText(text.apply(range[2]));
        bar.setOnSeekBarChangeListener(
                new SeekBar.OnSeekBarChangeListener() {
                    private boolean dragged; // by a finger; keys and screen readers only move it

                    @Override
                    public void onProgressChanged(SeekBar moved, int progress, boolean fromUser) {
                        keep.accept(range[0] + progress);
                        says.setText(text.apply(range[0] + progress));
                        if (fromUser && !dragged) {
                            changed.run();
                        }
                    }

                    @Override
                    public void onStartTrackingTouch(SeekBar touched) {
                        dragged = true;
                    }

                    @Override
                    public void onStopTrackingTouch(SeekBar let) {
                        dragged = false;
                        changed.run();
                    }
                });
    }
}
