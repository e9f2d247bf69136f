package cleave.core;

import cleave.core.kernels.CpuKernel;
import cleave.core.kernels.Kernel;
import cleave.core.session.Ending;
import cleave.core.session.LinkRates;
import cleave.core.session.Session;
import cleave.core.session.Welcome;
import cleave.core.transport.OkHttpTransport;
import java.io.IOException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;

/** Asks a server to measure the link to it: joins, is probed, learns the rates, leaves. */
public final class LinkMeter {
    /** What is offered to the server: enough for its largest probes. */
    private static final long MEMORY_BYTES = 64 << 20;

    /** A link that needs longer is given up. */
    private static final long PATIENCE_S = 300;

    private LinkMeter() {}

    /**
     * Measure once; takes a few seconds and the calling thread. No join code is used up.
     *
     * @throws IOException when the server is not there, refuses, or does not measure links
     */
    public static LinkRates measure(JoinLink link, CredentialStore credentials)
            throws IOException, InterruptedException {
        AtomicReference<LinkRates> found = new AtomicReference<>();
        ScheduledExecutorService timer = Executors.newScheduledThreadPool(1);
        ExecutorService kernelThread = Executors.newSingleThreadExecutor();
        OkHttpTransport transport = Device.transport(link, MEMORY_BYTES);
        Kernel kernel = CpuKernel.small();
        try {
            DeviceDescription device =
                    new DeviceDescription("link measurement", MEMORY_BYTES, "", "");
            Session session =
                    new Session(
                            transport,
                            kernel,
                            kernelThread,
                            Hello.of(device, link, credentials.find(link), 0, true, false, ""),
                            timer,
                            System::nanoTime,
                            new Session.Events() {
                                @Override
                                public void welcomed(Welcome welcome) {
                                    // Rates follow.
                                }

                                @Override
                                public void measured(LinkRates rates) {
                                    found.set(rates);
                                }

                                @Override
                                public void kernelLost(String reason) {
                                    throw new IllegalStateException(reason);
                                }
                            },
                            null,
                            null);
            timer.schedule(() -> session.leave("too slow"), PATIENCE_S, TimeUnit.SECONDS);
            Ending ending = session.run();
            if (found.get() == null) {
                throw new IOException("the link was not measured: " + ending.text);
            }
            return found.get();
        } finally {
            timer.shutdownNow();
            kernelThread.shutdown();
            kernel.close();
            transport.close();
        }
    }
}
