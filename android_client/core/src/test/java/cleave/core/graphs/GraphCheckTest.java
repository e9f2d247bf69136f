package cleave.core.graphs;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertTrue;

import cleave.core.protocol.Vectors;
import com.google.gson.JsonObject;
import java.nio.ByteBuffer;
import java.util.List;
import org.junit.Test;

public class GraphCheckTest {
    @Test
    public void refusesWhatIsNoGraphAndNothingElse() throws Exception {
        List<JsonObject> vectors = Vectors.read("graphs.json");
        assertTrue(vectors.size() > 10);
        for (JsonObject vector : vectors) {
            byte[] model = Vectors.bytes(vector.get("model"));
            boolean taken = isTaken(ByteBuffer.wrap(model));
            assertEquals(Vectors.name(vector), vector.get("is_graph").getAsBoolean(), taken);
        }
    }

    @Test
    public void aFlippedByteOrAnEarlierEndDoesNoHarm() throws Exception {
        for (JsonObject vector : Vectors.read("graphs.json")) {
            byte[] model = Vectors.bytes(vector.get("model"));
            for (int i = 0; i < Math.min(model.length, 200); i++) {
                isTaken(ByteBuffer.wrap(model, 0, i));
                byte kept = model[i];
                for (int value = 0; value < 256; value += 17) {
                    model[i] = (byte) value;
                    isTaken(ByteBuffer.wrap(model)); // either; nothing else is thrown
                }
                model[i] = kept;
            }
        }
    }

    private static boolean isTaken(ByteBuffer model) {
        try {
            GraphCheck.check(model);
            return true;
        } catch (GraphException error) {
            return false;
        }
    }
}
