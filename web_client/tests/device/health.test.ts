import { expect, test } from "vitest";
import { type Fetch, healthProbe } from "../../src/device/health";
import { FakeClock, settled } from "./fakes";

const PAGE = "https://ps.example:8443/assets/device.js?x#y";

/** A server that accepts and then says nothing, as `fetch` has it. */
const silent: Fetch = (_, { signal }) =>
  new Promise((_, reject) => {
    signal?.addEventListener("abort", () => reject(new Error("aborted")));
  });

test("it asks the origin of the page, past every cache", async () => {
  const asked: string[] = [];
  const ask: Fetch = async (url, { cache }) => {
    asked.push(`${url} ${cache}`);
    return { ok: true };
  };
  expect(await healthProbe(PAGE, ask, new FakeClock())()).toBe(true);
  expect(asked).toEqual(["https://ps.example:8443/healthz no-store"]);
});

test("a gateway that misses its server, and no network, are no answer", async () => {
  const clock = new FakeClock();
  expect(await healthProbe(PAGE, async () => ({ ok: false }), clock)()).toBe(false);
  const broken = () => Promise.reject(new TypeError("Failed to fetch"));
  expect(await healthProbe(PAGE, broken, clock)()).toBe(false);
});

test("a server that says nothing is given up after a while", async () => {
  const clock = new FakeClock();
  let answered: boolean | null = null;
  void healthProbe(PAGE, silent, clock)().then((answer) => {
    answered = answer;
  });
  await clock.pass(9);
  expect(answered).toBeNull();
  await clock.pass(1);
  await settled();
  expect(answered).toBe(false);
});
