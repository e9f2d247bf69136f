package cleave.core.protocol;

import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.google.gson.JsonPrimitive;
import java.io.ByteArrayOutputStream;
import java.io.File;
import java.io.FileInputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.Reader;
import java.math.BigInteger;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** The project's test vectors, read from the files that all clients share. */
public final class Vectors {
    /** The features that this client has. */
    private static final List<String> FEATURES =
            Arrays.asList("measure", "coding", "graphs", "keeps");

    private Vectors() {}

    /**
     * The vectors of a file in {@code tests/vectors} that are for this client; the property {@code
     * cleave.vectors} says where.
     */
    public static List<JsonObject> read(String name) throws IOException {
        File file = new File(System.getProperty("cleave.vectors"), name);
        try (Reader reader =
                new InputStreamReader(new FileInputStream(file), StandardCharsets.UTF_8)) {
            JsonObject whole = JsonParser.parseReader(reader).getAsJsonObject();
            List<JsonObject> found = new ArrayList<>();
            for (JsonElement vector : whole.getAsJsonArray("vectors")) {
                JsonElement feature = vector.getAsJsonObject().get("feature");
                if (feature == null || FEATURES.contains(feature.getAsString())) {
                    found.add(vector.getAsJsonObject());
                }
            }
            return found;
        }
    }

    /** Its name, for messages of failed assertions. */
    public static String name(JsonObject vector) {
        return vector.get("name").getAsString();
    }

    /** Hex, repeated hex, or a list of these. */
    public static byte[] bytes(JsonElement value) {
        ByteArrayOutputStream found = new ByteArrayOutputStream();
        if (value.isJsonArray()) {
            for (JsonElement part : value.getAsJsonArray()) {
                byte[] some = bytes(part);
                found.write(some, 0, some.length);
            }
        } else if (value.isJsonObject()) {
            byte[] once = bytes(value.getAsJsonObject().get("hex"));
            int times = value.getAsJsonObject().get("times").getAsInt();
            for (int i = 0; i < times; i++) {
                found.write(once, 0, once.length);
            }
        } else {
            String hex = value.getAsString();
            for (int i = 0; i < hex.length(); i += 2) {
                found.write(Integer.parseInt(hex.substring(i, i + 2), 16));
            }
        }
        return found.toByteArray();
    }

    /** A value as messages hold it. */
    static Object plain(JsonElement value) {
        if (value.isJsonNull()) {
            return null;
        }
        if (value.isJsonArray()) {
            List<Object> items = new ArrayList<>();
            for (JsonElement item : (JsonArray) value) {
                items.add(plain(item));
            }
            return items;
        }
        if (value.isJsonObject()) {
            JsonObject map = value.getAsJsonObject();
            return map.has("$int") ? integer(map.get("$int").getAsString()) : fields(map);
        }
        JsonPrimitive primitive = value.getAsJsonPrimitive();
        if (primitive.isBoolean()) {
            return primitive.getAsBoolean();
        }
        if (primitive.isString()) {
            return primitive.getAsString();
        }
        String number = primitive.getAsString();
        return number.matches("-?[0-9]+") ? integer(number) : (Object) primitive.getAsDouble();
    }

    static Map<String, Object> fields(JsonObject map) {
        Map<String, Object> found = new LinkedHashMap<>();
        for (Map.Entry<String, JsonElement> entry : map.entrySet()) {
            found.put(entry.getKey(), plain(entry.getValue()));
        }
        return found;
    }

    /** The message that a vector holds in parts. */
    public static Message message(JsonObject parts) throws ProtocolException {
        MessageType type = MessageType.named(parts.get("type").getAsString());
        ByteBuffer payload =
                type.hasPayload ? ByteBuffer.wrap(bytes(parts.get("payload"))) : null;
        return Message.checked(type, fields(parts.getAsJsonObject("fields")), payload);
    }

    private static Number integer(String text) {
        BigInteger found = new BigInteger(text);
        return found.bitLength() < Long.SIZE ? (Number) found.longValue() : found;
    }
}
