package cleave.core.session;

/** What a device did: a snapshot. */
public final class Counts {
    public static final Counts NOTHING = new Counts(0, 0, 0, 0);

    /** Blocks answered with a result. */
    public final long blocks;

    /** Floating-point operations of these. */
    public final double flops;

    /** Of messages, in either direction. */
    public final long downBytes;

    public final long upBytes;

    public Counts(long blocks, double flops, long downBytes, long upBytes) {
        this.blocks = blocks;
        this.flops = flops;
        this.downBytes = downBytes;
        this.upBytes = upBytes;
    }

    /** Both together. */
    public Counts plus(Counts more) {
        return new Counts(
                blocks + more.blocks,
                flops + more.flops,
                downBytes + more.downBytes,
                upBytes + more.upBytes);
    }
}
