package cleave.core.policy;

import static org.junit.Assert.assertEquals;
import static org.junit.Assert.assertThrows;
import static org.junit.Assert.assertTrue;

import java.util.concurrent.atomic.AtomicLong;
import org.junit.Test;

public class GateTest {
    private static final Policy ALL =
            new Policy(true, true, 38, Hours.parse("22-7"), null, 0.5, 0.25);
    private static final int MIDNIGHT = 0;

    private static Observation seen(
            int minute,
            boolean charging,
            boolean wifi,
            double temperatureC,
            Throttling throttling) {
        return new Observation(minute, charging, wifi, temperatureC, throttling);
    }

    private final AtomicLong nanos = new AtomicLong(-7);

    private Gate gate(Policy policy) {
        return new Gate(policy, nanos::get, span -> span == DataCap.Span.DAY ? 2_000_000_000L : 5);
    }

    private String reason(Policy policy, Observation seen) {
        return gate(policy).decide(seen).reason();
    }

    @Test
    public void opensWhenAllHolds() {
        Observation good = seen(MIDNIGHT, true, true, 30, Throttling.NONE);
        assertTrue(gate(ALL).decide(good).mayWork());
        assertEquals("", reason(ALL, good));
    }

    @Test
    public void saysWhichConditionFails() {
        Throttling none = Throttling.NONE;
        assertEquals("it is not between 22-7", reason(ALL, seen(12 * 60, true, true, 30, none)));
        assertEquals("it is not charging", reason(ALL, seen(MIDNIGHT, false, true, 30, none)));
        assertEquals(
                "it is not on Wi-Fi that is free to use",
                reason(ALL, seen(MIDNIGHT, true, false, 30, none)));
        assertEquals(
                "its battery is too warm, until it has 35 °C",
                reason(ALL, seen(MIDNIGHT, true, true, 40, none)));
        assertEquals(
                "its temperature cannot be seen",
                reason(ALL, seen(MIDNIGHT, true, true, Double.NaN, none)));
        assertEquals(
                "the system slows it down for its heat",
                reason(ALL, seen(MIDNIGHT, true, true, 30, Throttling.CRITICAL)));
    }

    @Test
    public void pausesWhenItsDataAreUsed() {
        Observation good = seen(MIDNIGHT, true, true, 30, Throttling.NONE);
        assertEquals(
                "its data limit of 2GB/day is reached", reason(capped("2 GB / day"), good));
        assertEquals("", reason(capped("2.1GB/day"), good));
        assertEquals("", reason(capped("1MB/hour"), good));
    }

    private static Policy capped(String cap) {
        return new Policy(true, true, 38, null, DataCap.parse(cap), 1, 1);
    }

    @Test
    public void whatIsNotAskedForDoesNotMatter() {
        Policy none = new Policy(false, false, 45, null, null, 1, 0.5);
        assertTrue(
                gate(none)
                        .decide(seen(12 * 60, false, false, 44, Throttling.UNKNOWN))
                        .mayWork());
    }

    @Test
    public void heatLastsUntilItHasCooled() {
        Gate gate = gate(ALL);
        double[] temperatures = {38, 38.1, 37, 35.1, 35, 37, 38.1};
        boolean[] works = {true, false, false, false, true, true, false};
        for (int i = 0; i < temperatures.length; i++) {
            Observation now = seen(MIDNIGHT, true, true, temperatures[i], Throttling.NONE);
            assertEquals("at " + temperatures[i], works[i], gate.decide(now).mayWork());
        }
    }

    @Test
    public void heatIsWatchedWhileSomethingElseForbids() {
        Gate gate = gate(ALL);
        assertEquals(
                "it is not charging",
                gate.decide(seen(MIDNIGHT, false, true, 41, Throttling.NONE)).reason());
        assertTrue(!gate.decide(seen(MIDNIGHT, true, true, 37, Throttling.NONE)).mayWork());
    }

    @Test
    public void throttlingLastsUntilThereIsNone() {
        Gate gate = gate(ALL);
        Throttling[] steps = {
            Throttling.MODERATE, Throttling.SEVERE, Throttling.LIGHT, Throttling.NONE,
            Throttling.LIGHT
        };
        boolean[] works = {true, false, false, true, true};
        for (int i = 0; i < steps.length; i++) {
            assertEquals(
                    works[i], gate.decide(seen(MIDNIGHT, true, true, 30, steps[i])).mayWork());
        }
    }

    @Test
    public void aChargerOrWifiThatWasAwayHasToStayForHalfAMinute() {
        Gate gate = gate(ALL);
        Observation good = seen(MIDNIGHT, true, true, 30, Throttling.NONE);
        Observation unplugged = seen(MIDNIGHT, false, true, 30, Throttling.NONE);
        Observation offline = seen(MIDNIGHT, true, false, 30, Throttling.NONE);
        assertTrue("at first it need not have been there", gate.decide(good).mayWork());
        int[] atS = {0, 5, 20, 24, 29, 50, 54, 55};
        Observation[] seen = {unplugged, good, good, offline, good, good, good, good};
        for (int i = 0; i < atS.length; i++) {
            nanos.set(atS[i] * 1_000_000_000L);
            assertTrue("at " + atS[i], !gate.decide(seen[i]).mayWork());
        }
        assertEquals(
                "its charger or Wi-Fi came back less than 30 s ago", gate.decide(good).reason());
        nanos.set(59_000_000_000L);
        assertTrue(gate.decide(good).mayWork());
        assertTrue(gate.decide(good).mayWork());
    }

    @Test
    public void otherConditionsHoldAtOnceAndHeatLastsThroughThem() {
        Gate gate = gate(ALL);
        assertTrue(!gate.decide(seen(MIDNIGHT, false, true, 30, Throttling.NONE)).mayWork());
        gate.setPolicy(new Policy(false, true, 38, null, null, 0.5, 0.25));
        assertTrue(gate.decide(seen(MIDNIGHT, false, true, 30, Throttling.NONE)).mayWork());
        assertTrue(!gate.decide(seen(MIDNIGHT, false, true, 39, Throttling.SEVERE)).mayWork());
        gate.setPolicy(ALL);
        assertEquals(
                "its battery is too warm, until it has 35 °C",
                gate.decide(seen(MIDNIGHT, true, true, 37, Throttling.NONE)).reason());
        assertTrue(gate.decide(seen(MIDNIGHT, true, true, 34, Throttling.NONE)).mayWork());
    }

    @Test
    public void hoursMayPassMidnight() {
        Hours night = Hours.parse("22-7");
        assertTrue(night.contains(22 * 60));
        assertTrue(night.contains(6 * 60 + 59));
        assertTrue(!night.contains(7 * 60));
        Hours day = Hours.parse(" 8:30 - 17 ");
        assertTrue(day.contains(8 * 60 + 30));
        assertTrue(!day.contains(8 * 60 + 29));
        assertTrue(!day.contains(17 * 60));
        assertEquals("8:30-17", day.toString());
        assertEquals("22-0", Hours.parse("22-24").toString());
    }

    @Test
    public void whatIsNoSpanOfHoursIsAnError() {
        String[] wrong = {"", "7", "7-7", "0-24", "25-3", "8:60-9", "a-b", "22–7"};
        for (String text : wrong) {
            IllegalArgumentException error =
                    assertThrows(IllegalArgumentException.class, () -> Hours.parse(text));
            assertEquals(
                    "'" + text + "' is no span of hours; write one like 22-7 or 8:30-17",
                    error.getMessage());
        }
    }

    @Test
    public void sharesAreOfWhatIsThereAndNeverNothing() {
        assertEquals(4, ALL.threads(8));
        assertEquals(1, ALL.threads(1));
        assertEquals(8, new Policy(true, true, 38, null, null, 1, 1).threads(8));
        assertEquals(1, new Policy(true, true, 38, null, null, 0.01, 1).threads(8));
        assertEquals(100L << 20, ALL.memoryBytes(400L << 20));
        assertEquals(16L << 20, ALL.memoryBytes(1 << 20));
    }

    @Test
    public void thermalStatusIsAndroids() {
        assertEquals(Throttling.NONE, Throttling.ofStatus(0));
        assertEquals(Throttling.SEVERE, Throttling.ofStatus(3));
        assertEquals(Throttling.SHUTDOWN, Throttling.ofStatus(6));
        assertEquals(Throttling.UNKNOWN, Throttling.ofStatus(-1));
        assertEquals(Throttling.UNKNOWN, Throttling.ofStatus(7));
    }
}
