package cleave.core.session;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertNull;
import static org.junit.Assert.assertSame;
import static org.junit.Assert.assertTrue;

import cleave.core.kernels.CpuKernel;
import cleave.core.kernels.Kernel;
import cleave.core.kernels.KernelException;
import cleave.core.kernels.KernelLostException;
import cleave.core.kernels.Matrix;
import cleave.core.kernels.Product;
import cleave.core.protocol.ErrorCode;
import cleave.core.protocol.Message;
import cleave.core.protocol.MessageType;
import java.nio.ByteBuffer;
import java.util.Arrays;
import java.util.Collections;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.junit.After;
import org.junit.Test;

public class SessionTest {
    /** A kernel that waits to be let go on, and can be made to fail. */
    private static final class SlowKernel implements Kernel {
        final Kernel real = CpuKernel.small();
        final Semaphore begun = new Semaphore(0);
        final Semaphore mayEnd = new Semaphore(0);
        volatile KernelException failsWith;
        volatile boolean outOfMemory;

        @Override
        public String name() {
            return "slow";
        }

        @Override
        public String about() {
            return "";
        }

        @Override
        public void hold(Matrix matrix) throws KernelException {
            if (failsWith != null) {
                throw failsWith;
            }
        }

        @Override
        public void forget(Matrix matrix) {
            // It keeps none.
        }

        @Override
        public ByteBuffer multiply(Product product) throws KernelException {
            begun.release();
            mayEnd.acquireUninterruptibly();
            if (outOfMemory) {
                throw new OutOfMemoryError("in a test");
            }
            if (failsWith != null) {
                throw failsWith;
            }
            return real.multiply(product);
        }

        @Override
        public void close() {
            real.close();
        }
    }

    private final FakeServer server = new FakeServer();
    private final SlowKernel kernel = new SlowKernel();
    private final AtomicLong skippedNanos = new AtomicLong();
    private final BlockingQueue<Object> events = new LinkedBlockingQueue<>();
    private final ExecutorService threads = Executors.newCachedThreadPool();
    private final ExecutorService kernelThread = Executors.newSingleThreadExecutor();
    private final ScheduledExecutorService timer = Executors.newScheduledThreadPool(2);
    private final Session session = session(false);
    private Future<Ending> running;

    private Session session(boolean measure) {
        return new Session(
                server,
                kernel,
                kernelThread,
                Message.of(MessageType.HELLO)
                        .with("role", "device")
                        .with("version", 1)
                        .with("memory_bytes", 16 << 20)
                        .with("measure", measure)
                        .build(),
                timer,
                () -> System.nanoTime() + skippedNanos.get(),
                new Session.Events() {
                    @Override
                    public void welcomed(Welcome welcome) {
                        events.add(welcome);
                    }

                    @Override
                    public void measured(LinkRates rates) {
                        events.add(rates);
                    }

                    @Override
                    public void kernelLost(String reason) {
                        events.add(reason);
                    }
                },
                null,
                null);
    }

    private void begin() throws Exception {
        running = threads.submit(session::run);
        assertSame(MessageType.HELLO, server.next().type);
    }

    private void beginWork() throws Exception {
        begin();
        server.welcome(0.2);
        server.put(1, 4);
    }

    private Ending ending() throws Exception {
        return running.get(FakeServer.PATIENCE_S, TimeUnit.SECONDS);
    }

    @After
    public void end() throws InterruptedException {
        kernel.mayEnd.release(1000);
        timer.shutdownNow();
        threads.shutdownNow();
        threads.awaitTermination(FakeServer.PATIENCE_S, TimeUnit.SECONDS);
        kernelThread.shutdown();
    }

    @Test
    public void aRunIsAnsweredWithItsResultAndCounted() throws Exception {
        beginWork();
        assertEquals("mine", ((Welcome) events.take()).credential);
        kernel.mayEnd.release();
        server.run(5, 1);
        Message result = server.next();
        assertEquals(5, result.integer("id"));
        assertEquals("fp32", result.text("dtype"));
        assertEquals(64, result.payload().remaining());
        assertEquals(1, session.counts().blocks);
        assertEquals(128, session.counts().flops, 0);
        assertTrue(session.counts().downBytes > 32);
        server.say(Message.of(MessageType.BYE).with("reason", "done").build());
        assertSame(End.BYE, ending().end);
        assertTrue(server.closed);
    }

    @Test
    public void workBeforeTheWelcomeBreaksTheProtocol() throws Exception {
        begin();
        server.put(1, 4);
        Message said = server.next();
        assertSame(MessageType.ERROR, said.type);
        assertEquals("protocol", said.text("code"));
        Ending ending = ending();
        assertSame(End.LOST, ending.end);
        assertTrue("it comes back", !ending.isForGood);
    }

    @Test
    public void heartbeatsDoNotWaitForArithmetic() throws Exception {
        beginWork();
        server.run(5, 1);
        kernel.begun.acquire();
        for (int i = 0; i < 3; i++) {
            assertSame(MessageType.HEARTBEAT, server.nextOfAll().type);
        }
    }

    @Test
    public void whatIsCancelledIsNeitherComputedNorAnswered() throws Exception {
        beginWork();
        server.run(5, 1);
        kernel.begun.acquire();
        server.run(6, 1);
        server.run(7, 1);
        server.say(
                Message.of(MessageType.CANCEL)
                        .with("ids", Arrays.asList(5L, 6L))
                        .build());
        kernel.mayEnd.release(2);
        assertEquals(7, server.next().integer("id"));
        assertEquals("only the first and the last began", 1, kernel.begun.drainPermits());
    }

    @Test
    public void aComputationGoesOnWithWhatWasDropped() throws Exception {
        beginWork();
        server.run(5, 1);
        kernel.begun.acquire();
        server.say(
                Message.of(MessageType.DROP).with("ids", Collections.singletonList(1L)).build());
        server.put(1, 4);
        kernel.mayEnd.release();
        assertSame(MessageType.RESULT, server.next().type);
    }

    @Test
    public void failuresOfArithmeticAreTaskErrorsAndTheSessionGoesOn() throws Exception {
        beginWork();
        kernel.outOfMemory = true;
        kernel.mayEnd.release(3);
        server.run(5, 1);
        assertEquals("not enough memory", server.next().text("reason"));
        kernel.outOfMemory = false;
        kernel.failsWith = new KernelException("no room");
        server.put(2, 4);
        server.run(6, 2);
        assertEquals("no room", server.next().text("reason"));
        server.run(7, 1);
        assertEquals(7, server.next().integer("id"));
        kernel.failsWith = null;
        kernel.mayEnd.release();
        server.run(8, 1);
        assertSame(MessageType.RESULT, server.next().type);
    }

    @Test
    public void aResultThatTheWireCannotSendIsATaskError() throws Exception {
        begin();
        server.welcome(2);
        server.put(1, 512);
        server.run(5, 1);
        Message answer = server.next();
        assertSame(MessageType.TASK_ERROR, answer.type);
        assertTrue(answer.text("reason").contains("1048576"));
    }

    @Test
    public void aLostKernelEndsTheSessionToBeTriedAgain() throws Exception {
        beginWork();
        events.take();
        server.run(5, 1);
        kernel.begun.acquire();
        kernel.failsWith = new KernelLostException("the GPU was reset");
        kernel.mayEnd.release();
        assertEquals("the GPU was reset", events.take());
        assertSame(End.LOST, ending().end);
        assertTrue(!ending().isForGood);
    }

    @Test
    public void afterDrainWhatWasAskedIsAnsweredUntilBye() throws Exception {
        beginWork();
        server.run(5, 1);
        kernel.begun.acquire();
        session.drain();
        assertSame(MessageType.DRAIN, server.next().type);
        server.run(6, 1);
        kernel.mayEnd.release(2);
        assertEquals(5, server.next().integer("id"));
        assertEquals(6, server.next().integer("id"));
        server.say(Message.of(MessageType.BYE).build());
        assertSame(End.BYE, ending().end);
    }

    @Test
    public void leavingSaysByeAndAnswersNothing() throws Exception {
        beginWork();
        server.run(5, 1);
        kernel.begun.acquire();
        session.leave("in a hurry");
        assertEquals("in a hurry", server.next().text("reason"));
        kernel.mayEnd.release();
        assertSame(End.LEFT, ending().end);
        assertNull(server.received.poll());
    }

    @Test
    public void whoIsOfflineClosesWithoutAWord() throws Exception {
        beginWork();
        session.drop("the network is gone");
        assertSame(End.LOST, ending().end);
        assertTrue(server.closed);
    }

    @Test
    public void afterByeNothingIsAnswered() throws Exception {
        beginWork();
        server.run(5, 1);
        kernel.begun.acquire();
        server.say(Message.of(MessageType.BYE).build());
        assertSame(End.BYE, ending().end);
        server.received.clear();
        kernel.mayEnd.release();
        kernelThread.submit(() -> null).get();
        assertNull(server.received.poll());
    }

    private static Message moved() {
        return Message.of(MessageType.BYE)
                .with("reason", "another server needs it more")
                .with("code", "moved")
                .with("address", "ws://h:2/ws#c=")
                .build();
    }

    @Test
    public void aServerThatWelcomedTheDeviceMaySendItElsewhere() throws Exception {
        beginWork();
        assertEquals("", session.movesTo());
        server.say(moved());
        assertTrue(!ending().isForGood);
        assertTrue(session.wasWelcome());
        assertEquals("ws://h:2/ws#c=", session.movesTo());
    }

    @Test
    public void aServerThatDidNotMayNot() throws Exception {
        begin();
        server.say(moved());
        assertSame(End.BYE, ending().end);
        assertTrue(!session.wasWelcome());
        assertEquals("", session.movesTo());
    }

    @Test
    public void anAddressWithAnotherCodeMeansNothing() throws Exception {
        beginWork();
        server.say(
                Message.of(MessageType.BYE)
                        .with("code", "closing")
                        .with("address", "ws://h:2/ws#c=")
                        .build());
        assertSame(End.BYE, ending().end);
        assertEquals("", session.movesTo());
    }

    @Test
    public void refusalsAreForGoodUnlessTheyPass() throws Exception {
        begin();
        server.say(
                Message.of(MessageType.ERROR)
                        .with("code", "credential")
                        .with("message", "no")
                        .build());
        assertSame(ErrorCode.CREDENTIAL, ending().code);
        assertTrue(ending().isForGood);
        assertTrue(Ending.refused(ErrorCode.DUPLICATE, "").isForGood);
        assertTrue(Ending.refused(ErrorCode.QUARANTINED, "").isForGood);
        assertTrue(Ending.refused(ErrorCode.VERSION, "").isForGood);
        assertTrue(!Ending.refused(ErrorCode.LIMIT, "").isForGood);
        assertTrue(!Ending.refused(ErrorCode.PROTOCOL, "").isForGood);
    }

    @Test
    public void aCodeThatOnlyNewerServersKnowIsShownAndPassesWhenTheySay() throws Exception {
        begin();
        Message.Builder error =
                Message.of(MessageType.ERROR)
                        .with("code", "tired")
                        .with("message", "\u001b[31mlater\u202e");
        assertTrue(Ending.refused(error.build()).isForGood);
        server.say(error.with("retry_after_s", 30.0).build());
        assertEquals("[31mlater", ending().text);
        assertTrue(!ending().isForGood);
        assertEquals(30, ending().backS, 0);
        assertEquals(3600, Ending.refused(error.with("retry_after_s", 1e300).build()).backS, 0);
    }

    @Test
    public void aWelcomeOfAnotherVersionIsRefused() throws Exception {
        begin();
        server.sayBytes(hex("92a777656c636f6d6582a776657273696f6e02a664657669636507"));
        Message error = server.next();
        assertEquals("version", error.text("code"));
        assertEquals(Collections.singletonList(1L), error.ids("versions"));
        assertTrue(ending().isForGood);
        assertTrue(ending().text, ending().text.contains("version 2 and this client speaks 1"));
    }

    private static byte[] hex(String text) {
        byte[] bytes = new byte[text.length() / 2];
        for (int i = 0; i < bytes.length; i++) {
            bytes[i] = (byte) Integer.parseInt(text.substring(2 * i, 2 * i + 2), 16);
        }
        return bytes;
    }

    @Test
    public void aServerThatBreaksTheProtocolIsToldAndLeft() throws Exception {
        begin();
        server.sayBytes(new byte[] {1, 2, 3});
        Message told = server.next();
        assertEquals("protocol", told.text("code"));
        assertSame(End.LOST, ending().end);
        assertTrue(server.closed);
    }

    @Test
    public void textAndWhatAServerDoesNotSendBreakItToo() throws Exception {
        begin();
        server.sayText();
        assertEquals("protocol", server.next().text("code"));
        assertSame(End.LOST, ending().end);
    }

    @Test
    public void aSilentServerIsAskedForAndLeftIfItIsGone() throws Exception {
        begin();
        server.welcome(0.2);
        skippedNanos.addAndGet(13_000_000_000L);
        server.asked.take().accept(true);
        skippedNanos.addAndGet(13_000_000_000L);
        server.asked.take().accept(false);
        Ending ending = ending();
        assertSame(End.LOST, ending.end);
        assertEquals("the server is gone", ending.text);
    }

    @Test
    public void whatBreaksSendingEndsTheSessionToBeTriedAgain() throws Exception {
        beginWork();
        server.onSend = new OutOfMemoryError("no room for a message");
        server.run(5, 1);
        kernel.mayEnd.release();
        Ending ending = ending();
        assertSame(End.LOST, ending.end);
        assertTrue(ending.text, ending.text.contains("no room for a message"));
        assertTrue(server.closed);
    }

    @Test
    public void telemetryIsSentOnceItIsWelcome() throws Exception {
        begin();
        session.tell(Collections.singletonMap("temperature_c", 30.0));
        server.welcome(2);
        events.take();
        session.tell(Collections.singletonMap("temperature_c", 31.5));
        assertEquals(
                Collections.singletonMap("temperature_c", 31.5),
                server.next().fields().get("values"));
    }

    @Test
    public void ratesAreToldToWhoAsked() throws Exception {
        Session measuring = session(true);
        running = threads.submit(measuring::run);
        server.next();
        server.welcome(2);
        events.take();
        server.say(
                Message.of(MessageType.MEASURED)
                        .with("downlink_bytes_per_s", 1e6)
                        .with("uplink_bytes_per_s", 2e6)
                        .with("latency_s", 0.01)
                        .build());
        assertEquals(2e6, ((LinkRates) events.take()).uplinkBytesPerS, 0);
        server.cut();
        assertSame(End.LOST, ending().end);
    }
}
