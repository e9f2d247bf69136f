import { expect, test } from "vitest";
import { appLink, onAndroid } from "../../src/join/app";
import {
  type Conditions,
  mayNotWork,
  offered,
  STANDARD,
  type Surroundings,
} from "../../src/join/conditions";
import {
  forcedKernel,
  readInvitation,
  socketAddress,
  typedFragment,
  usedFragment,
} from "../../src/join/invitation";
import { deviceKind } from "../../src/join/kind";
import { deviceName, memoryBytes, threadsOf } from "../../src/join/names";
import { readProject, shareOfToday } from "../../src/join/project";
import {
  bytesPerSecond,
  flopsPerSecond,
  isIdle,
  type Sample,
  withSample,
} from "../../src/join/rates";
import { Saved } from "../../src/join/saved";
import { said } from "../../src/join/words";
import { State } from "../../src/device/guest";
import { ErrorCode } from "../../src/protocol/messages";
import { storage } from "./storage";

test("an address's fragment holds code and server", () => {
  expect(readInvitation("#c=AB%2FC+1&s=SRV&fp=sha256:00")).toEqual({
    code: "AB/C+1",
    server: "SRV",
  });
  expect(readInvitation("")).toEqual({ code: "", server: "" });
  expect(readInvitation("#c=%zz")).toEqual({ code: "", server: "" });
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
  const invitation = { code: "CODE", server: "S" };
  expect(saved.keys(invitation)).toEqual({ credential: "CODE", join_code: "" });
  expect(saved.keep({ server: "S", credential: "mine" })).toBe(true);
  expect(saved.keys(invitation)).toEqual({ credential: "mine", join_code: "CODE" });
  expect(saved.keys({ code: "CODE", server: "T" })?.credential).toBe("CODE");
  expect(saved.keys({ code: "", server: "" })?.credential).toBe("mine");
  expect(new Saved(null).keys({ code: "", server: "" })).toBeNull();
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
    "The battery is low (10 %). Work continues above 20 %, or while it charges.",
  );
  const charging = { ...around, battery: { level: 0.1, charging: true } };
  expect(why(STANDARD, charging)).toBeNull();
  expect(why({ ...STANDARD, hidden: true }, charging)).toContain("not in front");
  expect(why(STANDARD, { ...charging, metered: true })).toContain("metered");
  expect(why(STANDARD, { ...charging, hot: true })).toContain("hot");
  expect(why({ ...STANDARD, hot: false }, { ...charging, hot: true })).toBeNull();
  const unplugged = { ...around, battery: { level: 0.9, charging: false } };
  expect(why({ ...STANDARD, unplugged: true }, unplugged)).toContain("plugged in");
  expect(why(STANDARD, charging, 1.9e9)).toBeNull();
  expect(why(STANDARD, charging, 2e9)).toContain("limit of 2 GB today");
});

test("a share of today's training counts the hours since midnight", () => {
  const now = new Date(2026, 0, 5, 7, 30);
  const hour = (at: number) => new Date(2026, 0, 5, at).getTime() / 3_600_000;
  const project = readProject({
    title: "Ada's lab",
    about: 5,
    flops_by_hour: [[hour(-1), 9e9], [hour(0), 60], [hour(7), 40], ["x", 1], [1]],
  });
  expect(project).toMatchObject({ title: "Ada's lab", about: "" });
  expect(shareOfToday(8, project, now)).toBe("8 %");
  expect(shareOfToday(0.2, project, now)).toBe("less than 1 %");
  expect(shareOfToday(120, project, now)).toBe("100 %"); // the server counts later
  expect(shareOfToday(0, project, now)).toBe("");
  expect(shareOfToday(5, readProject(null), now)).toBe("");
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

test("speed is that of the last seconds, and the use of data that of the last minute", () => {
  let samples: Sample[] = [];
  for (let at_s = 0; at_s <= 200; at_s++) {
    const flops = at_s < 190 ? 0 : 1e9 * (at_s - 190);
    const counts = { blocks: 0, flops, graphs: 0, down_bytes: 3e6 * at_s, up_bytes: 1e6 * at_s };
    samples = withSample(samples, { at_s, counts });
  }
  expect(flopsPerSecond(samples)).toBeCloseTo(1e9);
  expect(bytesPerSecond(samples)).toBeCloseTo(4e6);
  expect(samples.length).toBeLessThan(64);
  expect(flopsPerSecond([])).toBe(0);
  expect(bytesPerSecond(samples.slice(-10))).toBeNull();
});

test("a device that gets no work for a minute says so", () => {
  const counts = { blocks: 7, flops: 9e9, graphs: 0, down_bytes: 3e6, up_bytes: 2e6 };
  const sampled = (finished: number, received: number) => {
    let samples: Sample[] = [];
    for (let at_s = 0; at_s <= 90; at_s++) {
      const blocks = counts.blocks + finished * at_s;
      const down_bytes = counts.down_bytes + received * at_s;
      samples = withSample(samples, { at_s, counts: { ...counts, blocks, down_bytes } });
    }
    return samples;
  };
  expect(isIdle(sampled(0, 100))).toBe(true); // heartbeats
  expect(isIdle(sampled(0, 1e5))).toBe(false); // it receives a large array
  expect(isIdle(sampled(1, 100))).toBe(false);
  expect(isIdle(sampled(0, 100).slice(-30))).toBe(false); // too early to say
  expect(isIdle([])).toBe(false);
  const before = sampled(0, 100).map(({ at_s, counts }) => ({
    at_s,
    counts: { ...counts, blocks: 0 },
  }));
  expect(isIdle(before.slice(0, 3))).toBe(true); // it has not worked yet
  const notice = { state: State.WORKING, reason: "", code: null, retry_s: null };
  const status = { notice, counts, device: null, kernel: null, unused: [] };
  expect(said(status).headline).toBe("This device is helping");
  expect(said(status, true).headline).toBe("This device is ready");
});

test("a device has a name and offers what it can spare", () => {
  const phone =
    "Mozilla/5.0 (Linux; Android 10; K) AppleWebKit/537.36 Chrome/130.0 Mobile Safari/537.36";
  expect(deviceName(phone)).toBe("Chrome on Android");
  expect(deviceName("")).toBe("Browser on a device");
  expect([1, 2, 4, 64].map(threadsOf)).toEqual([1, 1, 3, 8]);
  expect(memoryBytes(8, true)).toBe(512 * 2 ** 20);
  expect(memoryBytes(undefined, false)).toBe(64 * 2 ** 20);
  expect(memoryBytes(0.25, true)).toBe(64 * 2 ** 20);
});

test("why the server does not let a device in is said in its words", () => {
  const counts = { blocks: 0, flops: 0, graphs: 0, down_bytes: 0, up_bytes: 0 };
  const reason = "this device's credential was revoked: sold; to join again, ask for a code";
  const notice = { state: State.ENDED, reason, code: ErrorCode.CREDENTIAL, retry_s: null };
  const { headline, detail } = said({ notice, counts, device: null, kernel: null, unused: [] });
  expect(headline).toBe("The server does not let this device in");
  expect(detail).toBe(`T${reason.slice(1)}.`);
});
