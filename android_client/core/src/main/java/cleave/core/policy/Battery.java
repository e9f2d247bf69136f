package cleave.core.policy;

/** What the system tells of the battery now; NaN for what it does not. */
public final class Battery {
    public final boolean charging;

    /** From 0 to 1. */
    public final double level;

    public final double temperatureC;

    /** Drawn from it, positive; of a phone that is plugged in this says nothing. */
    public final double drawW;

    /** Below this a phone that multiplies draws nothing: it tells milliamperes. */
    private static final int LEAST_MICROAMPERES = 10_000;

    public Battery(boolean charging, double level, double temperatureC, double drawW) {
        this.charging = charging;
        this.level = level;
        this.temperatureC = temperatureC;
        this.drawW = drawW;
    }

    /**
     * Watts, from what Android tells; NaN where that cannot be.
     *
     * <p>Makers disagree on the current's sign: of a phone that is not plugged in it is drawn. And
     * some tell milliamperes where microamperes are asked for. Those are numbers that no phone
     * draws so little as to mean, and are not believed rather than guessed at.
     *
     * @param microamperes {@code Integer.MIN_VALUE} where it is not told
     * @param millivolts 0 or less where it is not told
     */
    public static double drawW(int microamperes, int millivolts) {
        long drawn = Math.abs((long) microamperes);
        boolean told = microamperes != Integer.MIN_VALUE && millivolts > 0;
        return told && drawn >= LEAST_MICROAMPERES ? drawn * 1e-6 * millivolts * 1e-3 : Double.NaN;
    }
}
