package cleave.app;

import android.content.Context;
import android.content.Intent;
import android.content.IntentFilter;
import android.net.ConnectivityManager;
import android.net.Network;
import android.net.NetworkCapabilities;
import android.os.BatteryManager;
import android.os.Build;
import android.os.PowerManager;
import cleave.core.policy.Battery;
import cleave.core.policy.Observation;
import cleave.core.policy.Throttling;
import java.util.Calendar;

/** Looks at the phone: battery, network, heat. */
final class PhoneState {
    private static final int ANDROID_10 = 29;

    private final Context context;
    private final BatteryManager manager;
    private final ConnectivityManager networks;
    private final PowerManager power;

    PhoneState(Context context) {
        this.context = context;
        manager = context.getSystemService(BatteryManager.class);
        networks = context.getSystemService(ConnectivityManager.class);
        power = context.getSystemService(PowerManager.class);
    }

    /** All that the owner's conditions are about. */
    Observation observe() {
        Calendar now = Calendar.getInstance();
        int minute = 60 * now.get(Calendar.HOUR_OF_DAY) + now.get(Calendar.MINUTE);
        Battery battery = battery();
        return new Observation(
                minute, battery.charging, isOnWifi(), battery.temperatureC, throttling());
    }

    /** The latest that the system told of the battery. */
    Battery battery() {
        IntentFilter changes = new IntentFilter(Intent.ACTION_BATTERY_CHANGED);
        Intent told = context.registerReceiver(null, changes);
        if (told == null) {
            return new Battery(false, Double.NaN, Double.NaN, Double.NaN);
        }
        int level = told.getIntExtra(BatteryManager.EXTRA_LEVEL, -1);
        int scale = told.getIntExtra(BatteryManager.EXTRA_SCALE, -1);
        int tenths = told.getIntExtra(BatteryManager.EXTRA_TEMPERATURE, Integer.MIN_VALUE);
        int millivolts = told.getIntExtra(BatteryManager.EXTRA_VOLTAGE, 0);
        return new Battery(
                told.getIntExtra(BatteryManager.EXTRA_PLUGGED, 0) != 0,
                level >= 0 && scale > 0 ? (double) level / scale : Double.NaN,
                tenths == Integer.MIN_VALUE ? Double.NaN : tenths / 10.0,
                drawW(millivolts));
    }

    /** How much the system slows itself down. */
    Throttling throttling() {
        return Build.VERSION.SDK_INT < ANDROID_10
                ? Throttling.UNKNOWN
                : Throttling.ofStatus(power.getCurrentThermalStatus());
    }

    private double drawW(int millivolts) {
        return Battery.drawW(
                manager.getIntProperty(BatteryManager.BATTERY_PROPERTY_CURRENT_NOW), millivolts);
    }

    private boolean isOnWifi() {
        Network network = networks.getActiveNetwork();
        NetworkCapabilities can = network == null ? null : networks.getNetworkCapabilities(network);
        return can != null
                && can.hasCapability(NetworkCapabilities.NET_CAPABILITY_NOT_METERED)
                && (can.hasTransport(NetworkCapabilities.TRANSPORT_WIFI)
                        || can.hasTransport(NetworkCapabilities.TRANSPORT_ETHERNET));
    }
}
