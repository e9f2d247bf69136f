package android.os;

import stub.Unknown;

public class BatteryManager {
    public static final int BATTERY_PROPERTY_CURRENT_NOW = Unknown.INT;
    public static final String EXTRA_LEVEL = Unknown.TEXT;
    public static final String EXTRA_PLUGGED = Unknown.TEXT;
    public static final String EXTRA_SCALE = Unknown.TEXT;
    public static final String EXTRA_TEMPERATURE = Unknown.TEXT;
    public static final String EXTRA_VOLTAGE = Unknown.TEXT;

    BatteryManager() {}

    public int getIntProperty(int id) {
        throw Unknown.body();
    }
}
