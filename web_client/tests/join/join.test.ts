import { expect, test } from "vitest";
import { appLink, onAndroid } from "../../src/join/app";
import {
  type Conditions,
  mayNotWork,
  offered,
  standard,
  type Surroundings,
} from "../../src/join/conditions";
import {
  forcedKernel,
  readInvitation,
  socketAddress,
  typedFragment,
  usedFragment,
} from "../../src/join/invitation";
import { chosenName, deviceName, memoryBytes, threadsOf } from "../../src/join/names";
import {
  isDead,
  Key,
  Others,
  otherHelpers,
  Outlook,
  outlook,
  type Project,
  readProject,
  shareOfToday,
  UNKNOWN,
} from "../../src/join/project";
import {
  averageBytesPerSecond,
  bytesPerSecond,
  flopsPerSecond,
  helps,
  isTested,
  type Sample,
  withSample,
} from "../../src/join/rates";
import { Saved } from "../../src/join/saved";
import { deadKey, NO_WORK, said, type Situation } from "../../src/join/words";
import { NOTHING, State } from "../../src/device/guest";
import { ErrorCode } from "../../src/protocol/messages";
import { deviceKind } from "../../src/ui/kind";
import { storage } from "./storage";

const STANDARD = standard(true);

test("an address's fragment holds code and server", () => {
  expect(readInvitation("#c=AB%2FC+1&s=SRV&fp=sha256:00")).toEqual({
    code: "AB/C+1",
    server: "SRV",
    app: false,
  });
  expect(readInvitation("")).toEqual({ code: "", server: "", app: false });
  expect(readInvitation("#c=%zz&app=1")).toEqual({ code: "", server: "", app: true });
  expect(readInvitation(usedFragment("a&b")).server).toBe("a&b");
});

test("an Android browser's page leads into the app with all of its address", () => {
  const address = "https://10.0.0.2:8765/join#c=AB-C&s=S&fp=sha256:00";
  const link = appLink(address);
  expect(new URL(link).searchParams.get("url")).toBe(address);
  expect(link.startsWith("cleave://join?url=https%3A%2F%2F10.0.0.2%3A8765%2Fjoin%23c%3D")).toBe(
    true,
  );
  expect(onAndroid("Mozilla/5.0 (Linux; Android 14; Pixel 8) Chrome/131 Mobile")).toBe(true);
  expect(onAndroid("Mozilla/5.0 (X11; Linux x86_64) Chrome/131")).toBe(false);
});

test("the protocol is spoken where the page came from", () => {
  expect(socketAddress({ protocol: "https:", host: "a:1" })).toBe("wss://a:1/ws");
  expect(socketAddress({ protocol: "http:", host: "[::1]:2" })).toBe("ws://[::1]:2/ws");
});

test("a kernel can be forced, by its name", () => {
  expect(forcedKernel("?kernel=wasm")).toBe("wasm");
  expect(forcedKernel("")).toBeNull();
  expect(() => forcedKernel("?kernel=abacus")).toThrow(/abacus.*webgpu, wasm, js/);
});

test("a kept credential goes first, with the code in reserve", () => {
  const saved = new Saved(storage());
  const invitation = { code: "CODE", server: "S", app: false };
  expect(saved.keys(invitation)).toEqual({ credential: "CODE", join_code: "" });
  expect(saved.keep({ server: "S", credential: "mine" })).toBe(true);
  expect(saved.keys(invitation)).toEqual({ credential: "mine", join_code: "CODE" });
  expect(saved.keys({ ...invitation, server: "T" })?.credential).toBe("CODE");
  expect(saved.keys({ ...invitation, code: "", server: "" })?.credential).toBe("mine");
  expect(new Saved(null).keys({ ...invitation, code: "", server: "" })).toBeNull();
});

const CHROME = "AppleWebKit/537.36 (KHTML, like Gecko) Chrome/131.0.0.0";
test.each([
  ["phone", `Mozilla/5.0 (Linux; Android 10; K) ${CHROME} Mobile Safari/537.36`, true, 5],
  ["tablet", `Mozilla/5.0 (Linux; Android 10; K) ${CHROME} Safari/537.36`, false, 10],
  ["phone", "Mozilla/5.0 (Android 14; Mobile; rv:133.0) Gecko/133.0 Firefox/133.0", undefined, 5],
  ["tablet", "Mozilla/5.0 (Android 14; Tablet; rv:133.0) Gecko/133.0 Firefox/133.0", undefined, 5],
  ["phone", "Mozilla/5.0 (iPhone; CPU iPhone OS 18_1 like Mac OS X) Mobile/15E148", undefined, 5],
  ["tablet", "Mozilla/5.0 (iPad; CPU OS 12_5 like Mac OS X) Mobile/15E148", undefined, 5],
  ["tablet", "Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7) Safari/605.1.15", undefined, 5],
  ["", "Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7) Safari/605.1.15", undefined, 0],
  ["", `Mozilla/5.0 (Windows NT 10.0; Win64; x64) ${CHROME} Safari/537.36`, false, 10],
])("a browser runs on: %j", (kind, userAgent, mobile, maxTouchPoints) => {
  expect(deviceKind({ userAgent, mobile, maxTouchPoints })).toBe(kind);
});

test("a forbidden or broken storage keeps nothing and breaks nothing", () => {
  const broken = storage();
  broken.setItem("cleave.choices", "{");
  expect(new Saved(broken).choices(STANDARD)).toEqual(STANDARD);
  expect(new Saved(null).keep({ server: "S", credential: "c" })).toBe(false);
});

test("conditions stop the work, and only those that the browser can tell are offered", () => {
  const around = {
    battery: { level: 0.1, charging: false },
    metered: null,
    hidden: true,
    hot: null,
  };
  const now = new Date(2026, 0, 5);
  const why = (chosen: Conditions, around: Surroundings, used = 0) =>
    mayNotWork(chosen, around, used, now);
  expect(offered(around)).toEqual(["lowBattery", "unplugged", "hidden"]);
  expect(offered({ ...around, battery: null, metered: true })).toEqual(["hidden", "metered"]);
  expect(offered({ ...around, battery: null, hot: false })).toEqual(["hot", "hidden"]);
  expect(why(STANDARD, around)).toBe(
    "The battery is low (10\u00a0%). Helping continues at 20\u00a0%, or while it charges.",
  );
  const at = (level: number) => ({ ...around, battery: { level, charging: false }, hidden: false });
  expect(why(STANDARD, at(0.2))).toBeNull();
  expect(why(STANDARD, at(0.199))).toContain("(19\u00a0%)");
  const charging = { ...around, battery: { level: 0.1, charging: true } };
  expect(why(STANDARD, charging)).toContain("not in front"); // phones stop pages nobody sees
  expect(why(standard(false), charging)).toBeNull();
  charging.hidden = false;
  expect(why(STANDARD, charging)).toBeNull();
  expect(why(STANDARD, { ...charging, metered: true })).toContain("metered");
  expect(why(STANDARD, { ...charging, hot: true })).toContain("hot");
  expect(why({ ...STANDARD, hot: false }, { ...charging, hot: true })).toBeNull();
  const unplugged = { ...charging, battery: { level: 0.9, charging: false } };
  expect(why({ ...STANDARD, unplugged: true }, unplugged)).toContain("not charging");
  expect(why(STANDARD, charging, 1.9e9)).toBeNull();
  expect(why(STANDARD, charging, 2e9)).toContain("limit of 2 GB a day");
});

test("a share of today's training counts the hours since midnight", () => {
  const now = new Date(2026, 0, 5, 7, 30);
  const hour = (at: number) => new Date(2026, 0, 5, at).getTime() / 3_600_000;
  const project = readProject({
    title: "Ada's lab",
    about: 5,
    training: { state: "running", devices: 1, bytes_per_device_s: "much" },
    key: "golden",
    flops_by_hour: [[hour(-1), 9e9], [hour(0), 60], [hour(7), 40], ["x", 1], [1]],
  });
  const training = { state: "running", devices: 1, bytes_per_device_s: null, work: null };
  expect(project).toMatchObject({ title: "Ada's lab", about: "", training, key: Key.UNTOLD });
  expect(shareOfToday(8, project, now)).toBe("You did 8\u00a0% of today's training.");
  expect(shareOfToday(0.2, project, now)).toContain("less than 1\u00a0%");
  // Another device may have done the rest, or its work of the last second.
  for (const flops of [99.6, 100, 120]) {
    expect(shareOfToday(flops, project, now)).toBe("You did nearly all of today's training.");
  }
  expect(shareOfToday(0, project, now)).toBe("");
  expect(shareOfToday(5, UNKNOWN, now)).toBe("");
});

test("a reload goes on where the owner had started, in this tab only", () => {
  const tab = storage();
  const saved = new Saved(storage(), tab);
  expect(saved.helping).toBeNull();
  saved.helping = "";
  expect(new Saved(storage(), tab).helping).toBe("");
  saved.helping = "#s=SERVER";
  expect(new Saved(storage(), tab).helping).toBe("#s=SERVER");
  expect(new Saved(storage(), storage()).helping).toBeNull();
  saved.helping = null;
  expect(new Saved(storage(), tab).helping).toBeNull();
  expect(new Saved(storage()).helping).toBeNull();
});

test("a code is typed alone or in its link", () => {
  const typed = [" 7kq4-mwx2-pdh9 ", "https://10.0.0.2:8765/join#c=AB-C&s=S"];
  const read = typed.map((each) => readInvitation(typedFragment(each)).code);
  expect(read).toEqual(["7kq4-mwx2-pdh9", "AB-C"]);
});

/** One sample a second; `each` says what happened until then. */
function sampled(seconds: number, each: (at_s: number) => Partial<Sample["counts"]>): Sample[] {
  let samples: Sample[] = [];
  for (let at_s = 0; at_s <= seconds; at_s++) {
    samples = withSample(samples, { at_s, counts: { ...NOTHING, ...each(at_s) }, busy: false });
  }
  return samples;
}

test("speed and the use of data are those of the last seconds", () => {
  const samples = sampled(200, (at_s) => ({
    flops: at_s < 190 ? 0 : 1e9 * (at_s - 190),
    down_bytes: 3e6 * at_s,
    up_bytes: 1e6 * at_s,
  }));
  expect(flopsPerSecond(samples)).toBeCloseTo(1e9);
  expect(bytesPerSecond(samples)).toBeCloseTo(4e6);
  expect(samples.length).toBeLessThan(200);
  expect(flopsPerSecond([])).toBe(0);
  expect(bytesPerSecond(samples.slice(-5))).toBeNull(); // too early to say
  expect(bytesPerSecond([])).toBeNull();
});

test("forecasts are of the average over minutes", () => {
  // A step of half a minute moves all of its data in 5 seconds.
  const moved = (at_s: number) => 6e6 * (5 * Math.floor(at_s / 30) + Math.min(5, at_s % 30));
  const after = (seconds: number) => sampled(seconds, (at_s) => ({ down_bytes: moved(at_s) }));
  expect(bytesPerSecond(after(185))).toBeGreaterThan(2e6);
  expect(averageBytesPerSecond(after(40))).toBeNull(); // too early to say
  for (const seconds of [150, 155, 160, 175, 185, 300, 315]) {
    const average = averageBytesPerSecond(after(seconds))!;
    expect(average / 1e6).toBeGreaterThan(0.85);
    expect(average / 1e6).toBeLessThan(1.2);
  }
});

test("the server's tests are no work, and their bytes no use of data", () => {
  const tests = (at_s: number) => Math.min(at_s, 4);
  const joined = (at_s: number) => ({ tests: tests(at_s), down_bytes: 6e6 * tests(at_s) });
  expect(helps(sampled(2, joined))).toBe(false);
  expect(isTested(sampled(2, joined))).toBe(true);
  expect(bytesPerSecond(sampled(9, joined))).toBeNull();
  expect(isTested(sampled(12, joined))).toBe(false);
  const after = sampled(12, (at_s) => ({ ...joined(at_s), blocks: at_s, up_bytes: 1e6 * at_s }));
  expect(bytesPerSecond(after)).toBeCloseTo(1e6);
});

test("a device helps only with work in the last seconds", () => {
  const heard = (at_s: number) => ({ blocks: 7, down_bytes: 100 * at_s }); // heartbeats
  const idle = sampled(20, heard);
  expect(helps(idle)).toBe(false);
  expect(helps([])).toBe(false);
  expect(helps(sampled(20, (at_s) => ({ down_bytes: 1e5 * at_s })))).toBe(true); // a large array
  expect(helps(sampled(20, (blocks) => ({ blocks })))).toBe(true);
  expect(helps(sampled(20, (at_s) => ({ blocks: Math.min(at_s, 12) })))).toBe(false);
  const last = idle.at(-1)!;
  expect(helps([...idle, { ...last, at_s: 21, busy: true }])).toBe(true); // a long run
});

const NOTICE = { state: State.WORKING, reason: "", code: null, retry_s: null, lost: false };
const STATUS = { counts: NOTHING, busy: false, device: null, kernel: null, unused: [] };
const NOW: Situation = {
  title: "Jonas",
  host: "10.0.0.2",
  thing: "phone",
  online: true,
  helps: false,
  tested: false,
  helped: false,
  training: "",
  outlook: Outlook.WORK,
  others: Others.NOBODY,
  key: Key.KNOWN,
  reason: "",
  alone: false,
};

test.each([
  ["This phone is helping", { helps: true, training: "running" }],
  ["This phone is offline", { helps: true, online: false }],
  ["Testing the connection", { tested: true, training: "running" }],
  ["This phone is ready", { training: "running" }],
  ["This phone is ready", { training: "" }],
  ["This phone is ready", { training: "done" }], // before it came
  ["Training finished. Thank you!", { training: "done", helped: true }],
])("a connected device says: %s", (headline, changes) => {
  expect(said({ ...STATUS, notice: NOTICE }, { ...NOW, ...changes }).headline).toBe(headline);
});

/** What the server says of a training that runs. */
function running(training: object, own = false): Project {
  return readProject({ own, training: { state: "running", devices: 1, ...training } });
}

test("a device is told when the training runs without devices", () => {
  const told = (bytes_per_device_s: unknown, state = "running") =>
    outlook(running({ state, bytes_per_device_s }), true);
  const { ALONE, WORK } = Outlook;
  expect([told(0), told(null), told(5), told(0, "done")]).toEqual([ALONE, WORK, WORK, WORK]);
  const now = { ...NOW, training: "running", outlook: ALONE };
  expect(said({ ...STATUS, notice: NOTICE }, now).detail).toContain("runs without helpers");
});

const { WORK, ALONE, NONE, NEVER } = Outlook;
test.each([
  // What the training gives, whether its settings say so, and the outlook of: a stranger, an own
  // device, an own device whose browser cannot run layers.
  [null, false, WORK, WORK, WORK],
  [["tiles"], false, WORK, WORK, WORK],
  [["tiles", "layers"], true, WORK, WORK, WORK],
  [["layers"], true, NEVER, WORK, NEVER],
  [["layers"], false, NONE, WORK, NONE],
  [[], true, NEVER, NEVER, NEVER],
  [[], false, ALONE, ALONE, ALONE],
])("a training that gives %j has work for: %s", (work, settled, stranger, own, plain) => {
  expect(outlook(running({ work, settled }), true)).toBe(stranger);
  expect(outlook(running({ work, settled, layers_on: "any" }), true)).toBe(own);
  expect(outlook(running({ work, settled }, true), true)).toBe(own);
  expect(outlook(running({ work, settled }, true), false)).toBe(plain);
  expect(outlook(readProject({ training: { state: "paused", work, settled } }), true)).toBe(WORK);
});

test("a device without work is told why, and that there is nothing to do", () => {
  const paused = { ...NOTICE, state: State.PAUSED, reason: NO_WORK };
  const told = (others: Others) =>
    said({ ...STATUS, notice: paused }, { ...NOW, training: "running", outlook: NEVER, others });
  const stranger = told(otherHelpers(running({ work: ["layers"] })));
  expect(stranger.headline).toBe("No work for this phone");
  expect(stranger.detail).toContain("only to devices that belong to Jonas");
  expect(stranger.detail).toContain("You may close this page");
  expect(stranger.detail).toContain("ask for a link for own devices");
  const own = told(otherHelpers(running({ work: ["layers"] }, true)));
  expect(own.detail).toContain("this browser cannot do");
  const alone = told(otherHelpers(running({ work: [] })));
  expect(alone.detail).toContain("runs without helpers");
  expect(own.detail + alone.detail).not.toContain("link");
  // Connected, because the training may need it at any time.
  const waits = { ...NOW, training: "running", outlook: NONE, others: Others.OWN };
  expect(said({ ...STATUS, notice: NOTICE }, waits)).toEqual(stranger);
});

test("a wait says who does not answer, and how long it takes", () => {
  const notice = { ...NOTICE, state: State.WAITING, reason: "no server answers", retry_s: 15.2 };
  const status = { ...STATUS, notice: { ...notice, lost: true } };
  expect(said(status, NOW)).toEqual({
    headline: "No answer from Jonas",
    detail: "Trying again in 16\u00a0s.",
  });
  expect(said(status, { ...NOW, title: "" }).headline).toBe("No answer from 10.0.0.2");
  expect(said(status, { ...NOW, online: false }).headline).toBe("This phone is offline");
  const full = said({ ...STATUS, notice: { ...notice, reason: "the server is full" } }, NOW);
  expect(full.detail).toMatch(/^The server is full\. Trying/);
});

test("another tab's turn is said, and its end", () => {
  const notice = { ...NOTICE, state: State.ENDED, code: ErrorCode.DUPLICATE };
  const status = { ...STATUS, notice };
  expect(said(status, NOW).headline).toBe("This phone helps in another tab");
  expect(said(status, { ...NOW, alone: true }).headline).toBe("The other tab has stopped");
});

test("a device has a name and offers what it can spare", () => {
  const phone =
    "Mozilla/5.0 (Linux; Android 10; K) AppleWebKit/537.36 Chrome/130.0 Mobile Safari/537.36";
  expect(deviceName(phone)).toBe("Android phone");
  expect(deviceName("")).toBe("Computer");
  expect([chosenName("  ", phone), chosenName(" Ada ", phone)]).toEqual(["Android phone", "Ada"]);
  expect([1, 2, 4, 64].map(threadsOf)).toEqual([1, 1, 3, 8]);
  expect(memoryBytes(8, true)).toBe(512 * 2 ** 20);
  expect(memoryBytes(undefined, false)).toBe(64 * 2 ** 20);
  expect(memoryBytes(0.25, true)).toBe(64 * 2 ** 20);
});

test("why a link does not work is said in words for its reader", () => {
  const dead = Object.values(Key).filter(isDead);
  expect(dead).toHaveLength(6);
  for (const key of dead) {
    const { headline, detail } = deadKey(key, "Jonas", "phone");
    expect(`${headline} ${detail}`).not.toMatch(/server|operator|code|cleave|token/);
  }
  expect(deadKey(Key.EXPIRED, "Jonas", "phone")).toEqual({
    headline: "This link has expired",
    detail: "Ask Jonas for a new one.",
  });
  expect(deadKey(Key.EXPIRED, "", "phone").detail).toBe("Ask whoever sent it for a new one.");
  const notice = { ...NOTICE, state: State.ENDED, code: ErrorCode.CREDENTIAL };
  const now = { ...NOW, key: Key.REVOKED };
  expect(said({ ...STATUS, notice }, now).headline).toBe("This phone may not help any more");
  const why = { ...now, reason: "you have left the lab" };
  expect(said({ ...STATUS, notice }, why).detail).toBe(
    "Jonas has ended that. The reason: You have left the lab. With a new link, it may help again.",
  );
  // Before the server has said why, the link is not blamed that has worked so far.
  const first = said({ ...STATUS, notice }, { ...NOW, key: Key.KNOWN });
  expect(first.headline).toBe("This phone may not help any more");
});

test("a browser forgets a server and the choices, on demand", () => {
  const saved = new Saved(storage(), storage());
  saved.keep({ server: "S", credential: "mine" });
  saved.keepContribution("S", { blocks: 1, flops: 2, seconds: 3 });
  saved.keepChoices({ hot: false });
  saved.keepTitle("S", "Jonas");
  saved.keepDataUse({ day: { name: "2026-01-05", bytes: 5, flops: 0, seconds: 0 } });
  expect(saved.title("S")).toBe("Jonas");
  saved.forget("S");
  expect(saved.title("S")).toBe("");
  expect(saved.dataUse().day?.bytes).toBe(5); // today's limit still counts it
  expect(saved.device({ code: "", server: "", app: false })).toBeNull();
  expect(saved.contribution("S").seconds).toBe(0);
  expect(saved.choices(STANDARD)).toEqual(STANDARD);
});
