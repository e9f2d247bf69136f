package cleave.app;

import android.content.Context;
import android.content.SharedPreferences;
import android.os.SystemClock;
import cleave.core.policy.DataCap;
import cleave.core.policy.DataMeter;
import cleave.core.policy.Hours;
import cleave.core.policy.Policy;
import java.util.Calendar;

/** What the owner chose, kept in the app's private storage. */
final class Settings {
    static final int COOLEST_C = 30;
    static final int HOTTEST_C = 50;
    static final int LEAST_CORES_PERCENT = 10;
    static final int LEAST_MEMORY_PERCENT = 5;
    static final int MOST_MEMORY_PERCENT = 60;

    private static final String WHEN_CHARGING = "when_charging";
    private static final String ON_WIFI = "on_wifi";
    private static final String TEMPERATURE_C = "temperature_c";
    private static final String HOURS = "hours";
    private static final String DATA_CAP = "data_cap";
    private static final String CORES_PERCENT = "cores_percent";
    private static final String MEMORY_PERCENT = "memory_percent";

    private final SharedPreferences kept;

    Settings(Context context) {
        kept = context.getSharedPreferences("settings", Context.MODE_PRIVATE);
    }

    boolean whenCharging() {
        return kept.getBoolean(WHEN_CHARGING, true);
    }

    void setWhenCharging(boolean value) {
        kept.edit().putBoolean(WHEN_CHARGING, value).apply();
    }

    boolean onWifi() {
        return kept.getBoolean(ON_WIFI, true);
    }

    void setOnWifi(boolean value) {
        kept.edit().putBoolean(ON_WIFI, value).apply();
    }

    int temperatureC() {
        return kept.getInt(TEMPERATURE_C, 38);
    }

    void setTemperatureC(int value) {
        kept.edit().putInt(TEMPERATURE_C, value).apply();
    }

    /** As it was written; empty: at any. */
    String hours() {
        return kept.getString(HOURS, "");
    }

    /**
     * @throws IllegalArgumentException when it is neither empty nor a span of hours
     */
    void setHours(String text) {
        String plain = text.trim();
        kept.edit().putString(HOURS, plain.isEmpty() ? "" : Hours.parse(plain).toString()).apply();
    }

    /** As it was written; empty: any amount. */
    String dataCap() {
        return kept.getString(DATA_CAP, "");
    }

    /**
     * @throws IllegalArgumentException when it is neither empty nor a limit of data
     */
    void setDataCap(String text) {
        String plain = text.trim();
        String cap = plain.isEmpty() ? "" : DataCap.parse(plain).toString();
        kept.edit().putString(DATA_CAP, cap).apply();
    }

    int coresPercent() {
        return kept.getInt(CORES_PERCENT, 50);
    }

    void setCoresPercent(int value) {
        kept.edit().putInt(CORES_PERCENT, value).apply();
    }

    int memoryPercent() {
        return kept.getInt(MEMORY_PERCENT, 40);
    }

    void setMemoryPercent(int value) {
        kept.edit().putInt(MEMORY_PERCENT, value).apply();
    }

    /** Counts what is used of the limit, from what was counted before. */
    DataMeter dataMeter() {
        DataMeter.Store store =
                new DataMeter.Store() {
                    @Override
                    public String read(String name) {
                        return kept.getString(name, "");
                    }

                    @Override
                    public void write(String name, String text) {
                        kept.edit().putString(name, text).apply();
                    }
                };
        return new DataMeter(store, Calendar::getInstance, SystemClock::elapsedRealtimeNanos);
    }

    Policy policy() {
        return new Policy(
                whenCharging(),
                onWifi(),
                temperatureC(),
                hours().isEmpty() ? null : Hours.parse(hours()),
                dataCap().isEmpty() ? null : DataCap.parse(dataCap()),
                coresPercent() / 100.0,
                memoryPercent() / 100.0);
    }
}
