import { expect, test } from "vitest";
import { announce } from "../../src/dashboard/announce";
import type { FleetEvent } from "../../src/dashboard/overview";
import {
  carbon,
  counted,
  difference,
  energy,
  energyOf,
  loss,
  meanOf,
  percent,
  seconds,
  serverLoads,
} from "../../src/dashboard/text";

function event(id: number, kind = "join"): FleetEvent {
  return { id, time_s: id, kind, device: id, text: `phone-${id} ${kind}` };
}

test("spans of time from milliseconds to days", () => {
  expect([0, 0.0042, 0.85, 2.413, 12.34, 200, null].map(seconds)).toEqual([
    "0 s",
    "4.2 ms",
    "850 ms",
    "2.41 s",
    "12.3 s",
    "3 min 20 s",
    "–",
  ]);
});

test("a rate says over what it is the mean", () => {
  expect([10, 2.5, null].map(meanOf)).toEqual(["mean of 10.0 s", "mean of 2.50 s", "mean of –"]);
});

test("figures in words", () => {
  expect([0.934, 0.004, 0, null].map(percent)).toEqual([
    "93\u202f%",
    "0.4\u202f%",
    "0\u202f%",
    "–",
  ]);
  expect([energy(500), energy(7200), energy(null)]).toEqual(["500 J", "2 Wh", "–"]);
  expect(energyOf({ energy_j: 500, energy_basis: "measured" })).toBe("500 J, measured");
  expect(energyOf({ energy_j: 500, energy_basis: "modelled" })).toBe("500 J");
  expect([carbon(0.0123), carbon(1500)]).toEqual(["12.3 mg", "1.50 kg"]);
  expect([loss(Number.NaN), loss(2.5)]).toEqual(["not a number", "2.5000"]);
  expect([counted(1, "device"), counted(2, "device")]).toEqual(["1 device", "2 devices"]);
});

test("relative differences, from rounding to runs that went wrong", () => {
  expect([0, 1.234e-6, 9.96e-3, 0.0345, 0.999, 123, Infinity].map(difference)).toEqual([
    "0",
    "1.2e-6",
    "0.01",
    "0.035",
    "1",
    "120",
    "infinite",
  ]);
});

test("what happened before the page was opened is not told", () => {
  expect(announce(null, [event(1), event(2)], 100)).toEqual({ last: 2, told_s: 0, text: "" });
});

test("one event is told in its words, several in one sentence, seldom", () => {
  const start = announce(null, [event(1)], 100);
  const one = announce(start, [event(1), event(2)], 101);
  expect(one.text).toBe("phone-2 join");
  const events = [event(1), event(2), event(3), event(4, "leave")];
  expect(announce(one, events, 103)).toBe(one);
  expect(announce(one, events, 107).text).toBe("2 events: 1 join, 1 leave");
});

test("how many devices several servers have", () => {
  expect(serverLoads([2, 3])).toBe("2 servers with 2 + 3 devices");
  expect(serverLoads([2, null, 3])).toBe("3 servers with 2 + 3 devices; no answer from server 2");
});
