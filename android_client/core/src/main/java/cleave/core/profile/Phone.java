package cleave.core.profile;

/** What a phone says of itself. */
public final class Phone {
    /** As its maker calls it: {@code Fairphone FP5}. */
    public final String title;

    /** A tablet rather than a phone. */
    public final boolean isTablet;

    public final String processor;
    public final int cores;
    public final int threads;
    public final String system;

    /** What it would offer to a server. */
    public final long memoryBytes;

    public final long installedBytes;

    public Phone(
            String title,
            boolean isTablet,
            String processor,
            int cores,
            int threads,
            String system,
            long memoryBytes,
            long installedBytes) {
        this.title = title;
        this.isTablet = isTablet;
        this.processor = processor;
        this.cores = cores;
        this.threads = threads;
        this.system = system;
        this.memoryBytes = memoryBytes;
        this.installedBytes = installedBytes;
    }
}
