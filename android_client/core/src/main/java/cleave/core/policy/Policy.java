package cleave.core.policy;

/** When a phone may work, and how much of it: what its owner chose. */
public final class Policy {
    /** Work only when it is plugged in. */
    public final boolean whenCharging;

    /** Work only on a network that is not metered: Wi-Fi or a cable. */
    public final boolean onWifi;

    /** Degrees Celsius of the battery above which it stops. */
    public final double maxTemperatureC;

    /** Null: at any. */
    public final Hours hours;

    /** Null: any amount. */
    public final DataCap dataCap;

    /** Share of the processor's cores, above 0 to 1. */
    public final double coresShare;

    /** Share of the memory that an app may use, above 0 to 1. */
    public final double memoryShare;

    public Policy(
            boolean whenCharging,
            boolean onWifi,
            double maxTemperatureC,
            Hours hours,
            DataCap dataCap,
            double coresShare,
            double memoryShare) {
        this.whenCharging = whenCharging;
        this.onWifi = onWifi;
        this.maxTemperatureC = maxTemperatureC;
        this.hours = hours;
        this.dataCap = dataCap;
        this.coresShare = coresShare;
        this.memoryShare = memoryShare;
    }

    /** Threads to multiply with: one at least. */
    public int threads(int cores) {
        return (int) Math.max(1, Math.min(cores, Math.round(coresShare * cores)));
    }

    /** Bytes to offer of those there are: as much as the protocol asks for at least. */
    public long memoryBytes(long bytes) {
        long share = (long) (memoryShare * bytes);
        return Math.max(cleave.core.protocol.Limits.MIN_DEVICE_MEMORY_BYTES, share);
    }
}
