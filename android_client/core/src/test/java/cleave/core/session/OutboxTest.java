package cleave.core.session;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertSame;
import static org.junit.Assert.assertTrue;

import cleave.core.coding.Exponents;
import cleave.core.kernels.DType;
import cleave.core.protocol.Message;
import cleave.core.protocol.MessageType;
import java.nio.ByteBuffer;
import java.util.concurrent.atomic.AtomicLong;
import org.junit.Test;

public class OutboxTest {
    private final FakeServer server = new FakeServer();
    private final AtomicLong sentBytes = new AtomicLong();
    private final Outbox outbox = new Outbox(server, sentBytes::addAndGet);
    private final Thread sender = new Thread(outbox);

    private static Message answer(long run) {
        return Message.of(MessageType.TASK_ERROR).with("id", run).with("reason", "").build();
    }

    @Test
    public void signsOfLifeGoFirstAndTheOthersInOrder() throws Exception {
        server.waitingBytes = 1 << 30; // it takes nothing for now
        sender.start();
        outbox.add(answer(1));
        outbox.add(answer(2));
        outbox.addHeartbeat();
        outbox.addHeartbeat();
        server.waitingBytes = 0;
        assertSame(MessageType.HEARTBEAT, server.nextOfAll().type);
        assertEquals(1, server.nextOfAll().integer("id"));
        assertEquals(2, server.nextOfAll().integer("id"));
    }

    @Test
    public void itIsClosedAfterWhatIsThereAndTakesNothingMore() throws Exception {
        server.open(new QuietListener());
        outbox.add(answer(1));
        outbox.close();
        outbox.add(answer(2));
        sender.start();
        sender.join();
        assertEquals(1, server.nextOfAll().integer("id"));
        assertTrue(server.received.isEmpty());
        assertTrue(server.closed);
        assertTrue(sentBytes.get() > 0);
    }

    @Test
    public void aWireThatTakesNothingCanBeCancelled() throws Exception {
        server.waitingBytes = 1 << 30;
        server.open(new QuietListener());
        outbox.add(answer(1));
        sender.start();
        outbox.cancel();
        sender.join();
        assertTrue(server.closed);
        assertTrue(server.received.isEmpty());
    }

    @Test
    public void largeResultsGoCodedOnceThatIsAllowed() throws Exception {
        sender.start();
        outbox.add(result(100));
        assertSame(MessageType.RESULT, server.nextOfAll().type);
        outbox.codeResults();
        outbox.add(result(100));
        outbox.add(result(10));
        Message coded = server.nextOfAll();
        assertSame(MessageType.RESULT_CODED, coded.type);
        assertEquals(
                ByteBuffer.wrap(new byte[4 * 100 * 100]),
                Exponents.decode(coded.payload(), DType.FP32, 4 * 100 * 100));
        assertSame("too small", MessageType.RESULT, server.nextOfAll().type);
        outbox.cancel();
    }

    private static Message result(int side) {
        return Message.of(MessageType.RESULT)
                .with("id", 1)
                .with("rows", side)
                .with("columns", side)
                .with("dtype", "fp32")
                .with("compute_s", 0.0)
                .payload(ByteBuffer.wrap(new byte[4 * side * side]))
                .build();
    }

    private static final class QuietListener implements WireListener {
        @Override
        public void opened() {
            // Nobody waits for it.
        }

        @Override
        public void received(ByteBuffer message) {
            throw new AssertionError("nothing was sent");
        }

        @Override
        public void receivedWrong(String text) {
            throw new AssertionError(text);
        }

        @Override
        public void ended(Ending ending) {
            // As it should.
        }
    }
}
