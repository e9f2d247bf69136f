package cleave.core.profile;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertNotNull;
import static org.junit.Assert.assertNull;
import static org.junit.Assert.assertTrue;

import cleave.core.kernels.CpuKernel;
import cleave.core.kernels.Kernel;
import cleave.core.kernels.KernelException;
import java.io.File;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import org.junit.Test;

public class ProfileRunTest {
    private static final Phone PHONE =
            new Phone(
                    "ACME \"Eins\" Ultra+ 5G",
                    false,
                    "ACME A1",
                    8,
                    4,
                    "Android 14",
                    200L << 20,
                    8L << 30);

    private static final long LONGEST_NANOS = 20_000_000;

    private double progress;
    private long nowNanos;
    private long lookedNanos = System.nanoTime();

    /** The time, but never much later than at the last look: however busy this machine is. */
    private long nanos() {
        long looked = System.nanoTime();
        nowNanos += Math.min(looked - lookedNanos, LONGEST_NANOS);
        lookedNanos = looked;
        return nowNanos;
    }

    private Measurements measure(double samplesS, double sustainedS, boolean stopped)
            throws KernelException {
        Kernel kernel = CpuKernel.factory(1, Thread::new).make();
        try {
            return new ProfileRun(
                            kernel,
                            samplesS,
                            sustainedS,
                            this::nanos,
                            () -> 31.5,
                            share -> {
                                assertTrue(share >= progress && share <= 1);
                                progress = share;
                            },
                            () -> stopped)
                    .run();
        } finally {
            kernel.close();
        }
    }

    /** Also writes the profile for a test in Python, which reads it as Cleave does. */
    @Test
    public void measuresEverySeriesAndWindow() throws KernelException, IOException {
        Measurements measured = measure(1, 0.5, false);
        assertNotNull(measured);
        for (Series series : Series.values()) {
            assertTrue(series.name(), measured.samples.stream().anyMatch(s -> s.series == series));
        }
        assertTrue(measured.samples.stream().anyMatch(sample -> sample.strips == 3));
        assertTrue(measured.samples.stream().allMatch(sample -> sample.seconds > 0));
        assertTrue(measured.windows.size() >= 3);
        assertEquals(1, progress, 0.1);
        String toml = ProfileFile.toml(PHONE, measured, "2026-11-21", "0.1.0");
        assertTrue(toml, toml.contains("title = \"ACME \\\"Eins\\\" Ultra+ 5G\"\n"));
        String target = System.getProperty("cleave.profile");
        if (target != null) {
            Files.write(new File(target).toPath(), toml.getBytes(StandardCharsets.UTF_8));
        }
    }

    @Test
    public void stopsWhenItsOwnerSaysSo() throws KernelException {
        assertNull(measure(60, 120, true));
    }

    @Test
    public void namesHaveOnlyWhatNamesMayHave() {
        assertEquals("acme-eins-ultra-5g", ProfileFile.name(PHONE));
        assertEquals("phone", ProfileFile.name(titled("手机")));
        assertEquals("a.b", ProfileFile.name(titled("..A.b!")));
        StringBuilder title = new StringBuilder();
        for (int i = 0; i < 50; i++) {
            title.append("ab ");
        }
        assertEquals(64, ProfileFile.name(titled(title.toString())).length());
    }

    private static Phone titled(String title) {
        return new Phone(title, false, "", 1, 1, "", 16L << 20, 0);
    }
}
