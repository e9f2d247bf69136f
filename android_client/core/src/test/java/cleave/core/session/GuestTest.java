package cleave.core.session;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertSame;
import static org.junit.Assert.assertTrue;

import cleave.core.protocol.ErrorCode;
import cleave.core.protocol.Message;
import cleave.core.protocol.MessageType;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.Executors;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import org.junit.After;
import org.junit.Test;

public class GuestTest {
    /** A visit that ends when it is told to. */
    private final class FakeVisit implements Visit {
        final BlockingQueue<Ending> endings = new LinkedBlockingQueue<>();
        final BlockingQueue<String> asked = new LinkedBlockingQueue<>();

        @Override
        public Counts counts() {
            return new Counts(1, 2, 3, 4);
        }

        @Override
        public Ending run() throws InterruptedException {
            visits.add(this);
            return endings.take();
        }

        @Override
        public void drain() {
            asked.add("drain");
        }

        @Override
        public void leave(String reason) {
            asked.add("leave");
            endings.add(Ending.left(reason));
        }

        @Override
        public void drop(String reason) {
            endings.add(Ending.lost(reason));
        }
    }

    private final BlockingQueue<FakeVisit> visits = new LinkedBlockingQueue<>();
    private final BlockingQueue<Notice> notices = new LinkedBlockingQueue<>();
    private final AtomicLong skippedNanos = new AtomicLong();
    private final ScheduledExecutorService timer = Executors.newScheduledThreadPool(1);
    private Guest guest = guest();
    private final Thread thread = new Thread(this::run);

    private Guest guest() {
        return new Guest(
                FakeVisit::new,
                notices::add,
                timer,
                () -> System.nanoTime() + skippedNanos.get(),
                () -> 1.0);
    }

    private void run() {
        try {
            guest.run();
        } catch (InterruptedException error) {
            notices.add(new Notice(State.ENDED, "interrupted"));
        }
    }

    private Notice next() throws InterruptedException {
        Notice notice = notices.poll(FakeServer.PATIENCE_S, TimeUnit.SECONDS);
        if (notice == null) {
            throw new AssertionError("nothing more is said");
        }
        return notice;
    }

    private FakeVisit working() throws InterruptedException {
        thread.start();
        return welcomed();
    }

    private FakeVisit welcomed() throws InterruptedException {
        FakeVisit visit = visits.take();
        assertSame(State.CONNECTING, next().state);
        guest.welcomed();
        assertSame(State.WORKING, next().state);
        return visit;
    }

    @After
    public void end() {
        thread.interrupt();
        timer.shutdownNow();
    }

    @Test
    public void waitsGrowToAMinuteAndAreSpread() {
        assertEquals(1, Guest.waitS(0, 1), 0);
        assertEquals(0.5, Guest.waitS(0, 0), 0);
        assertEquals(8, Guest.waitS(3, 1), 0);
        assertEquals(60, Guest.waitS(6, 1), 0);
        assertEquals(30, Guest.waitS(1000, 0), 0);
    }

    @Test
    public void aLostConnectionIsTriedAgainEverLaterUntilOneWasSteady() throws Exception {
        FakeVisit visit = working();
        visit.endings.add(Ending.lost("cut"));
        Notice waiting = next();
        assertEquals("cut", waiting.reason);
        assertEquals(1, waiting.retryS, 0);
        skippedNanos.addAndGet(1_000_000_000L);
        guest.online();
        welcomed().endings.add(Ending.lost("cut"));
        assertEquals(2, next().retryS, 0);
        guest.online();
        FakeVisit steady = welcomed();
        skippedNanos.addAndGet(61_000_000_000L);
        steady.endings.add(Ending.lost("cut"));
        assertEquals(1, next().retryS, 0);
        assertEquals(3, guest.counts().blocks);
    }

    @Test
    public void whenAServerIsAwayForLongNobodyNeedStayAwake() throws Exception {
        working().endings.add(Ending.lost("cut"));
        for (int seconds = 1; seconds < 32; seconds *= 2) {
            Notice waiting = next();
            assertEquals(seconds, waiting.retryS, 0);
            assertTrue(!waiting.waitsLong());
            guest.online();
            visits.take().endings.add(Ending.lost("refused"));
            assertSame(State.CONNECTING, next().state);
        }
        assertTrue(next().waitsLong());
        guest.online();
        assertTrue(!next().waitsLong());
    }

    @Test
    public void withoutANetworkItWaitsAndWithOneItComesBackAtOnce() throws Exception {
        working();
        guest.offline();
        assertEquals("the network is gone", next().reason);
        guest.online();
        welcomed();
    }

    @Test
    public void whoIsRefusedForGoodStaysAway() throws Exception {
        working().endings.add(Ending.refused(ErrorCode.DUPLICATE, "twice"));
        Notice ended = next();
        assertSame(State.ENDED, ended.state);
        assertSame(ErrorCode.DUPLICATE, ended.code);
        thread.join();
    }

    @Test
    public void aStrangerAtFirstEndsItAndLaterIsWaitedFor() throws Exception {
        working().endings.add(Ending.lost("cut"));
        assertSame(State.WAITING, next().state);
        guest.online();
        visits.take().endings.add(Ending.stranger("a sign-in page"));
        assertSame(State.CONNECTING, next().state);
        assertSame(State.WAITING, next().state);
    }

    @Test
    public void aStrangerInPlaceOfTheServerEndsIt() throws Exception {
        thread.start();
        visits.take().endings.add(Ending.stranger("another certificate"));
        assertSame(State.CONNECTING, next().state);
        Notice ended = next();
        assertSame(State.ENDED, ended.state);
        assertSame(End.STRANGER, ended.end);
    }

    @Test
    public void aPauseDrainsAndWaitsUntilItMayWorkAgain() throws Exception {
        FakeVisit visit = working();
        guest.pause("it is not charging");
        assertEquals("drain", visit.asked.take());
        assertSame(State.DRAINING, next().state);
        visit.endings.add(bye("drained", "drained", 0));
        Notice paused = next();
        assertSame(State.PAUSED, paused.state);
        assertEquals("it is not charging", paused.reason);
        guest.resume();
        welcomed();
    }

    @Test
    public void ofAPauseTheLatestReasonIsShownAndOnlyOnce() throws Exception {
        FakeVisit visit = working();
        guest.pause("it is not charging");
        assertSame(State.DRAINING, next().state);
        guest.pause("by you");
        visit.endings.add(bye("drained", "drained", 0));
        assertEquals("by you", next().reason);
        guest.pause("by you");
        guest.pause("it is too warm");
        Notice paused = next();
        assertSame(State.PAUSED, paused.state);
        assertEquals("it is too warm", paused.reason);
        assertEquals("drain", visit.asked.take());
        assertTrue(visit.asked.isEmpty());
        guest.resume();
        welcomed();
    }

    @Test
    public void beforeItMayWorkItDoesNotConnect() throws Exception {
        guest.pause("it is too warm");
        thread.start();
        assertSame(State.PAUSED, next().state);
        assertTrue(visits.isEmpty());
        guest.resume();
        welcomed();
    }

    @Test
    public void stoppedOnceItDrainsAndTwiceItLeaves() throws Exception {
        FakeVisit visit = working();
        guest.stop();
        assertEquals("drain", visit.asked.take());
        assertSame(State.DRAINING, next().state);
        guest.stop();
        assertEquals("leave", visit.asked.take());
        assertSame(State.ENDED, next().state);
        thread.join();
    }

    private static Ending bye(String reason, String code, double retryS) {
        return Ending.bye(
                Message.of(MessageType.BYE)
                        .with("reason", reason)
                        .with("code", code)
                        .with("retry_after_s", retryS)
                        .build());
    }

    @Test
    public void aServerThatIsDoneWithItEndsIt() throws Exception {
        working().endings.add(bye("the link is measured", "measured", 0));
        Notice ended = next();
        assertSame(State.ENDED, ended.state);
        assertEquals("the link is measured", ended.reason);
    }

    @Test
    public void afterAServerThatClosedItWaitsEverLongerAndComesBack() throws Exception {
        working().endings.add(bye("the server is started anew", "closing", 0));
        Notice waiting = next();
        assertSame(State.WAITING, waiting.state);
        assertSame(End.BYE, waiting.end);
        assertEquals("the server is started anew", waiting.reason);
        assertEquals(1, waiting.retryS, 0);
        guest.online();
        welcomed().endings.add(bye("", "", 0)); // of an older server
        assertEquals(2, next().retryS, 0);
        guest.online();
        welcomed().endings.add(bye("", "moving", 10)); // of a newer one
        assertEquals(10 + 4, next().retryS, 0);
        guest.online();
        welcomed().endings.add(Ending.refused(ErrorCode.QUARANTINED, "wrong results"));
        assertSame(State.ENDED, next().state);
    }
}
