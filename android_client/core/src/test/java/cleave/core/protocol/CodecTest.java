package cleave.core.protocol;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertNull;
import static org.junit.Assert.assertThrows;
import static org.junit.Assert.assertTrue;

import com.google.gson.JsonObject;
import java.io.ByteArrayOutputStream;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import org.junit.Test;

public class CodecTest {
    @Test
    public void readsEveryMessageToItsFields() throws Exception {
        for (JsonObject vector : Vectors.read("messages.json")) {
            check(vector, whole(vector));
        }
    }

    @Test
    public void readsWhatOthersMayWrite() throws Exception {
        for (JsonObject vector : Vectors.read("decode.json")) {
            check(vector, Vectors.bytes(vector.get("bytes")));
        }
    }

    @Test
    public void readsAWholeSession() throws Exception {
        for (JsonObject vector : Vectors.read("session.json")) {
            check(vector, Vectors.bytes(vector.get("bytes")));
        }
    }

    @Test
    public void whatItWritesReadsBackTheSame() throws Exception {
        for (JsonObject vector : Vectors.read("messages.json")) {
            Message message = Vectors.message(vector);
            ByteArrayOutputStream bytes = new ByteArrayOutputStream();
            bytes.write(Codec.header(message));
            if (message.payload() != null) {
                bytes.write(message.payload().array());
            }
            check(vector, bytes.toByteArray());
        }
    }

    @Test
    public void refusesWhatIsNoMessage() throws Exception {
        List<String> taken = new ArrayList<>();
        for (JsonObject vector : Vectors.read("invalid.json")) {
            try {
                Codec.decode(ByteBuffer.wrap(Vectors.bytes(vector.get("bytes"))));
                taken.add(Vectors.name(vector));
            } catch (ProtocolException error) {
                // As it must be.
            }
        }
        assertEquals(Collections.emptyList(), taken);
    }

    @Test
    public void everyPrefixOfAMessageIsRefused() throws Exception {
        for (JsonObject vector : Vectors.read("messages.json")) {
            byte[] bytes = whole(vector);
            for (int length = 0; length < Math.min(bytes.length, 300); length++) {
                ByteBuffer part = ByteBuffer.wrap(bytes, 0, length);
                assertThrows(ProtocolException.class, () -> Codec.decode(part));
            }
        }
    }

    @Test
    public void aFlippedByteDoesNoHarm() throws Exception {
        for (JsonObject vector : Vectors.read("messages.json")) {
            byte[] bytes = whole(vector);
            for (int i = 0; i < Math.min(bytes.length, 200); i++) {
                byte kept = bytes[i];
                for (int value = 0; value < 256; value += 23) {
                    bytes[i] = (byte) value;
                    try {
                        Codec.decode(ByteBuffer.wrap(bytes));
                    } catch (ProtocolException error) {
                        // That, or another message; nothing else.
                    }
                }
                bytes[i] = kept;
            }
        }
    }

    @Test
    public void lengthsThatNothingFollowsSetNoMemoryAside() {
        byte[] array = {(byte) 0x92, (byte) 0xdd, 0x7f, -1, -1, -1};
        byte[] text = {(byte) 0x92, (byte) 0xdb, 0x7f, -1, -1, -1};
        for (byte[] bytes : Arrays.asList(array, text)) {
            assertThrows(ProtocolException.class, () -> Codec.decode(ByteBuffer.wrap(bytes)));
        }
    }

    @Test
    public void aPayloadIsAViewOfTheMessage() throws Exception {
        Message put =
                Message.of(MessageType.PUT)
                        .with("id", 1)
                        .with("rows", 1)
                        .with("columns", 1)
                        .with("dtype", "bf16")
                        .payload(ByteBuffer.wrap(new byte[] {1, 2}))
                        .build();
        byte[] header = Codec.header(put);
        ByteBuffer bytes = ByteBuffer.allocate(header.length + 2);
        bytes.put(header).put((byte) 1).put((byte) 2).flip();
        Message read = Codec.decode(bytes);
        bytes.put(header.length, (byte) 9);
        assertEquals(9, read.payload().get(0));
    }

    @Test
    public void whatAPeerWouldRefuseIsNotBuilt() {
        Message.Builder id = Message.of(MessageType.TASK_ERROR).with("id", -1).with("reason", "");
        assertThrows(IllegalArgumentException.class, id::build);
        Message.Builder name = Message.of(MessageType.TASK_ERROR).with("id", 1);
        assertThrows(IllegalArgumentException.class, name::build);
        Map<String, Double> values = Collections.singletonMap("power_w", Double.NaN);
        Message.Builder nan = Message.of(MessageType.TELEMETRY).with("values", values);
        assertThrows(IllegalArgumentException.class, nan::build);
    }

    @Test
    public void textsAreCutAtCodePointsAndMended() {
        StringBuilder faces = new StringBuilder();
        for (int i = 0; i < Limits.MAX_TEXT + 1; i++) {
            faces.appendCodePoint(0x1f600);
        }
        String clean = Codec.cleanText(faces.toString());
        assertEquals(Limits.MAX_TEXT, clean.codePointCount(0, clean.length()));
        assertEquals("a?b", Codec.cleanText("a\ud800b"));
    }

    @Test
    public void whatAPeerSaysCanBeShownAndSecretsStayAsTheyAre() throws Exception {
        String dirty = "a\u001b[2Jb\r\nc\u202ed\u2066e\u0000\u009bf\u200bg\u2028h";
        Message hello =
                Message.of(MessageType.HELLO)
                        .with("role", "device")
                        .with("version", 1)
                        .with("name", dirty)
                        .with("credential", dirty)
                        .build();
        assertEquals("a[2Jb  cdefg h", hello.text("name"));
        assertEquals(dirty, hello.text("credential"));
        assertEquals("Łukasz’ 📱", Codec.shown("Łukasz’ 📱"));
    }

    @Test
    public void aSecretIsNotShown() {
        String secret = "x" + String.join("", Collections.nCopies(5000, "y"));
        Message.Builder hello =
                Message.of(MessageType.HELLO)
                        .with("role", "device")
                        .with("version", 1)
                        .with("credential", secret);
        Exception error = assertThrows(IllegalArgumentException.class, hello::build);
        assertTrue(error.getMessage().contains("credential"));
        assertTrue(!error.getMessage().contains("xy"));
    }

    private static byte[] whole(JsonObject vector) throws Exception {
        ByteArrayOutputStream bytes = new ByteArrayOutputStream();
        bytes.write(Vectors.bytes(vector.get("header")));
        if (vector.has("payload")) {
            bytes.write(Vectors.bytes(vector.get("payload")));
        }
        return bytes.toByteArray();
    }

    private static void check(JsonObject vector, byte[] bytes) throws Exception {
        String name = Vectors.name(vector);
        Message message = Codec.decode(ByteBuffer.wrap(bytes));
        assertEquals(name, vector.get("type").getAsString(), message.type.wireName);
        Map<String, Object> expected = Vectors.fields(vector.getAsJsonObject("fields"));
        assertEquals(name, expected.keySet(), message.fields().keySet());
        for (Map.Entry<String, Object> field : expected.entrySet()) {
            Object value = field.getValue();
            Object got = message.fields().get(field.getKey());
            if (got instanceof Double) {
                value = ((Number) value).doubleValue();
            }
            assertEquals(name + " " + field.getKey(), value, got);
        }
        if (vector.has("payload")) {
            ByteBuffer payload = ByteBuffer.wrap(Vectors.bytes(vector.get("payload")));
            assertEquals(name, payload, message.payload());
        } else {
            assertNull(name, message.payload());
        }
    }
}
