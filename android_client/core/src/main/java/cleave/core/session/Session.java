package cleave.core.session;

import cleave.core.device.Action;
import cleave.core.device.DeviceCore;
import cleave.core.device.HeldArrays;
import cleave.core.device.Shell;
import cleave.core.graphs.GraphWork;
import cleave.core.graphs.OpenGraph;
import cleave.core.kernels.Kernel;
import cleave.core.kernels.Matrix;
import cleave.core.kernels.Product;
import cleave.core.protocol.ByeCode;
import cleave.core.protocol.Codec;
import cleave.core.protocol.ErrorCode;
import cleave.core.protocol.Limits;
import cleave.core.protocol.Message;
import cleave.core.protocol.MessageType;
import cleave.core.protocol.ProtocolException;
import cleave.core.protocol.VersionException;
import java.nio.ByteBuffer;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Executor;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.TimeUnit;
import java.util.function.LongSupplier;

/** One connection: the device core between a wire and a kernel. */
public final class Session implements Visit {
    /** Room that a result's header takes at most. */
    private static final int HEADER_BYTES = 1024;

    /** How long what is still to be said may take when a session ends. */
    private static final double FAREWELL_S = 2;

    private static final double NANOS_PER_S = 1e9;

    /** Learns what happens in a session, in its threads; it must not call back. */
    public interface Events {
        void welcomed(Welcome welcome);

        /** What the server measured of the link; only if {@code hello} asked for it. */
        void measured(LinkRates rates);

        /** The kernel is of no more use; the session ends. */
        void kernelLost(String reason);
    }

    private final Transport transport;
    private final KernelThread kernel;
    private final Message hello;
    private final ScheduledExecutorService timer;
    private final LongSupplier nanos;
    private final Events events;
    private final LifeSigns lifeSigns;

    private final Object lock = new Object(); // of all that follows
    private final DeviceCore core;
    private final GraphThread graphs; // null where it runs none
    private final Shell shell = new SessionShell();
    private Outbox outbox;
    private Ending ending;
    private Kept kept; // for the next session
    private ScheduledFuture<?> handshake; // what ends one that takes too long
    private boolean opened;
    private boolean gone; // the wire
    private long downBytes;
    private long upBytes;

    /**
     * @param kernelThread the thread in which the kernel was made
     * @param timer its tasks must not wait for arithmetic
     * @param nanos a clock that never goes back
     * @param open what runs graphs; null where {@code hello} does not name that feature
     * @param before what the last session kept; null for nothing
     */
    public Session(
            Transport transport,
            Kernel kernel,
            Executor kernelThread,
            Message hello,
            ScheduledExecutorService timer,
            LongSupplier nanos,
            Events events,
            OpenGraph open,
            Kept before) {
        this.transport = transport;
        this.kernel = new KernelThread(kernel, kernelThread, nanos);
        this.hello = hello;
        this.timer = timer;
        this.nanos = nanos;
        this.events = events;
        lifeSigns = new LifeSigns(transport, timer, nanos, this::beat, this::serverGone);
        core =
                new DeviceCore(
                        hello.integer("memory_bytes"),
                        hello.flag("measure"),
                        hello.texts("features"),
                        before == null ? null : before.arrays);
        GraphThread.Answers answers = new GraphAnswers();
        if (before != null) {
            graphs = before.graphs.next(this::wants, this::roomBytes, answers);
        } else if (open != null) {
            graphs = new GraphThread(open, this::wants, this::roomBytes, answers, nanos);
        } else {
            graphs = null;
        }
    }

    @Override
    public Counts counts() {
        synchronized (lock) {
            return new Counts(core.blocks(), core.flops(), downBytes, upBytes);
        }
    }

    /** What is left of the memory that was offered. */
    private long roomBytes() {
        synchronized (lock) {
            return hello.integer("memory_bytes") - core.takenBytes();
        }
    }

    /** Whether the server has welcomed the device. */
    public boolean wasWelcome() {
        synchronized (lock) {
            return core.welcome() != null;
        }
    }

    /** The join URL of the server that this one sent the device to; empty where it did not. */
    public String movesTo() {
        synchronized (lock) {
            return wasWelcome() && ending != null ? ending.movesTo : "";
        }
    }

    @Override
    public Ending run() throws InterruptedException {
        synchronized (lock) {
            if (ending != null) {
                return ending; // it was left before it began
            }
            outbox = new Outbox(transport.open(new SessionWire()), this::sent);
            Thread sender = new Thread(outbox, "cleave-send");
            sender.setDaemon(true);
            // Not to the default one: on a phone that ends the app, elsewhere nobody would send.
            sender.setUncaughtExceptionHandler((thread, error) -> drop("cannot send: " + error));
            sender.start();
        }
        try {
            synchronized (lock) {
                while (ending == null) {
                    lock.wait();
                }
                long endNanos = nanos.getAsLong() + (long) (FAREWELL_S * NANOS_PER_S);
                while (!gone && nanos.getAsLong() < endNanos) {
                    lock.wait(1 + (endNanos - nanos.getAsLong()) / 1_000_000);
                }
                return ending;
            }
        } finally {
            synchronized (lock) {
                finish(Ending.left("interrupted")); // nothing happens if it is over already
                outbox.cancel();
            }
        }
    }

    @Override
    public void drain() {
        synchronized (lock) {
            if (core.welcome() == null) {
                leave("stopped");
            } else if (ending == null) {
                act(core.drain());
            }
        }
    }

    @Override
    public void leave(String reason) {
        synchronized (lock) {
            if (core.welcome() != null) {
                send(
                        Message.of(MessageType.BYE)
                                .with("reason", Codec.cleanText(reason))
                                .with("code", ByeCode.LEAVING.wireName)
                                .build());
            } else if (outbox != null && !opened) {
                outbox.cancel(); // still connecting, perhaps to nobody
            }
            finish(Ending.left(reason));
        }
    }

    @Override
    public void drop(String reason) {
        synchronized (lock) {
            if (outbox != null) {
                outbox.cancel();
            }
            finish(Ending.lost(reason), true);
        }
    }

    /**
     * What it keeps, for the next session, and keeps no longer; null if it keeps nothing. Only a
     * session whose connection was lost keeps anything.
     */
    public Kept take() {
        synchronized (lock) {
            Kept found = kept;
            kept = null;
            return found;
        }
    }

    /** Free what it keeps. */
    public void forget() {
        Kept found = take();
        if (found != null) {
            found.graphs.close();
        }
    }

    /** Tell the server how the device is. Nothing happens unless it was welcomed. */
    public void tell(Map<String, Double> values) {
        synchronized (lock) {
            if (core.welcome() != null && ending == null) {
                send(Message.of(MessageType.TELEMETRY).with("values", values).build());
            }
        }
    }

    private void endHandshake() {
        synchronized (lock) {
            if (core.welcome() == null) {
                finish(Ending.lost("the server does not answer"), true);
            }
        }
    }

    private void beat() {
        synchronized (lock) {
            if (ending == null) {
                outbox.addHeartbeat();
            }
        }
    }

    private void serverGone() {
        synchronized (lock) {
            finish(Ending.lost("the server is gone"), true);
        }
    }

    private final class SessionWire implements WireListener {
        @Override
        public void opened() {
            synchronized (lock) {
                if (ending != null) {
                    return;
                }
                opened = true;
                lifeSigns.heard();
                send(hello);
                handshake =
                        timer.schedule(
                                Session.this::endHandshake,
                                (long) (Limits.HANDSHAKE_S * NANOS_PER_S),
                                TimeUnit.NANOSECONDS);
            }
        }

        @Override
        public void received(ByteBuffer bytes) {
            try {
                Message message = Codec.decode(bytes);
                boolean taken = false;
                synchronized (lock) {
                    lifeSigns.heard();
                    downBytes += bytes.remaining();
                    if (ending == null) {
                        take(message);
                        taken = true;
                    }
                }
                if (taken) {
                    tell(message); // without the lock: who listens may have one of its own
                }
            } catch (VersionException error) {
                receivedAnotherVersion(error.getMessage());
            } catch (ProtocolException error) {
                receivedWrong(error.getMessage());
            }
        }

        @Override
        public void receivedWrong(String text) {
            refuse(
                    Message.of(MessageType.ERROR).with("code", ErrorCode.PROTOCOL.wireName),
                    text,
                    Ending.lost("the server broke the protocol: " + text));
        }

        private void receivedAnotherVersion(String text) {
            refuse(
                    Message.of(MessageType.ERROR)
                            .with("code", ErrorCode.VERSION.wireName)
                            .with("versions", Collections.singletonList((long) Limits.VERSION)),
                    text,
                    Ending.refused(ErrorCode.VERSION, text));
        }

        private void refuse(Message.Builder error, String text, Ending how) {
            synchronized (lock) {
                if (ending == null) {
                    send(error.with("message", Codec.cleanText(text)).build());
                    finish(how);
                }
            }
        }

        @Override
        public void ended(Ending how) {
            synchronized (lock) {
                gone = true;
                lock.notifyAll();
                finish(how, how.end == End.LOST || core.welcome() == null);
                outbox.cancel(); // nothing that is left can be said
            }
        }

        private void tell(Message message) {
            if (message.type == MessageType.WELCOME) {
                events.welcomed(Welcome.of(message));
            } else if (message.type == MessageType.MEASURED) {
                events.measured(LinkRates.of(message));
            }
        }
    }

    private final class SessionShell implements Shell {
        @Override
        public void send(Message message) {
            Session.this.send(message);
        }

        @Override
        public void hold(Matrix matrix) {
            kernel.hold(matrix);
        }

        @Override
        public void forget(Matrix matrix) {
            kernel.forget(matrix);
        }

        @Override
        public GraphWork graphs() {
            return graphs;
        }

        @Override
        public void compute(long run, Product product) {
            if (product.resultBytes() > transport.mostSentBytes() - HEADER_BYTES) {
                act(
                        core.failed(
                                run,
                                "a result of " + product.resultBytes()
                                        + " bytes is more than this client can send at once"));
                return;
            }
            kernel.multiply(product, () -> wants(run), new RunAnswer(run));
        }
    }

    private final class RunAnswer implements KernelThread.Answer {
        private final long run;

        RunAnswer(long run) {
            this.run = run;
        }

        @Override
        public void computed(ByteBuffer payload, double computeS) {
            synchronized (lock) {
                act(core.computed(run, payload, computeS));
            }
        }

        @Override
        public void failed(String reason) {
            synchronized (lock) {
                act(core.failed(run, reason));
            }
        }

        @Override
        public void lost(String reason) {
            events.kernelLost(reason);
            synchronized (lock) {
                finish(Ending.lost("the kernel stopped: " + reason));
            }
        }
    }

    private final class GraphAnswers implements GraphThread.Answers {
        @Override
        public void computed(long run, ByteBuffer payload, double computeS) {
            if (payload.remaining() > transport.mostSentBytes() - HEADER_BYTES) {
                failed(
                        run,
                        "a result of " + payload.remaining()
                                + " bytes is more than this client can send at once");
                return;
            }
            new RunAnswer(run).computed(payload, computeS);
        }

        @Override
        public void failed(long run, String reason) {
            new RunAnswer(run).failed(reason);
        }
    }

    // --- all that follows: with the lock ---

    private void take(Message message) throws ProtocolException {
        switch (message.type) {
            case BYE:
                outbox.clear(); // nothing is answered any more
                finish(Ending.bye(message), core.welcome() == null);
                break;
            case ERROR:
                outbox.clear();
                finish(Ending.refused(message), core.welcome() == null);
                break;
            case WELCOME:
                act(core.received(message));
                lifeSigns.begin(message.real("heartbeat_s"));
                break;
            default:
                if (core.welcome() == null) {
                    throw new ProtocolException(
                            "a device expects no " + message.type.wireName
                                    + " before its welcome");
                }
                act(core.received(message));
                if (core.codesResults()) {
                    outbox.codeResults();
                }
        }
    }

    private boolean wants(long run) {
        synchronized (lock) {
            return core.wants(run);
        }
    }

    private void act(List<Action> actions) {
        for (Action action : actions) {
            action.in(shell);
        }
    }

    private void send(Message message) {
        if (ending == null && outbox != null) {
            outbox.add(message);
        }
    }

    private void sent(long bytes) {
        synchronized (lock) {
            upBytes += bytes;
        }
    }

    private void finish(Ending how) {
        finish(how, false);
    }

    /** @param keeps whether to keep what a later session can use */
    private void finish(Ending how, boolean keeps) {
        if (ending != null) {
            return;
        }
        ending = how;
        lifeSigns.end();
        if (handshake != null) {
            handshake.cancel(false);
        }
        HeldArrays arrays = keeps ? core.held() : null;
        act(core.end(arrays));
        if (arrays != null) {
            kept = new Kept(arrays, graphs);
        } else if (graphs != null) {
            graphs.close();
        }
        if (outbox != null) {
            outbox.close();
        }
        lock.notifyAll();
    }
}
