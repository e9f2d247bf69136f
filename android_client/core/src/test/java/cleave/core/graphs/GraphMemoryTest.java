package cleave.core.graphs;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertTrue;

import cleave.core.protocol.Vectors;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;
import org.junit.Test;

public class GraphMemoryTest {
    @Test
    public void findsThePeakOfEachRunOrRefusesIt() throws Exception {
        List<JsonObject> vectors = Vectors.read("graph_runs.json");
        assertTrue(vectors.size() > 50);
        for (JsonObject vector : vectors) {
            JsonElement peak = vector.get("peak_bytes");
            String expected =
                    peak != null ? "" + peak.getAsLong() : vector.get("refused").getAsString();
            assertEquals(Vectors.name(vector), expected, found(vector));
        }
    }

    private static String found(JsonObject vector) throws Exception {
        List<GraphMemory.Given> given = new ArrayList<>();
        for (JsonElement one : vector.getAsJsonArray("inputs")) {
            JsonElement elements = one.getAsJsonObject().get("elements");
            boolean narrow = one.getAsJsonObject().get("narrow").getAsBoolean();
            long count = elements.isJsonNull() ? -1 : elements.getAsLong();
            given.add(new GraphMemory.Given(count, narrow));
        }
        List<Boolean> kept = new ArrayList<>();
        vector.getAsJsonArray("kept").forEach(one -> kept.add(one.getAsBoolean()));
        try {
            byte[] model = Vectors.bytes(vector.get("model"));
            return "" + new GraphMemory(ByteBuffer.wrap(model)).peakBytes(given, kept);
        } catch (UnboundedException error) {
            return error.refusal;
        }
    }
}
