import { expect, test } from "vitest";
import { arrange, census, NO_FILTER, share } from "../../src/dashboard/fleet";
import { readOverview } from "../../src/dashboard/overview";
import { DEVICE_COLUMNS, deviceRow, overviewData } from "./example";

const OVERVIEW = readOverview(
  overviewData({
    devices: {
      columns: DEVICE_COLUMNS,
      rows: [
        deviceRow({ device: 1, name: "b", kind: "phone", state: "busy", flops_per_s: 3 }),
        deviceRow({ device: 2, name: "a", kind: "laptop", state: "ready", flops_per_s: null }),
        deviceRow({ device: 3, name: "c", kind: "phone", state: "ready", flops_per_s: 5 }),
        deviceRow({ device: 4, name: "", kind: "", state: "lost", reason: "silent" }),
      ],
      total: 2006,
      by: [
        ["laptop", "ready", 3],
        ["phone", "busy", 1000],
        ["phone", "ready", 1002],
        [null, "lost", 1],
      ],
    },
  }),
);
const DEVICES = OVERVIEW.devices;

function numbers(filter = NO_FILTER, key: "device" | "name" | "flops_per_s", descending = false) {
  return arrange(DEVICES, filter, { key, descending }).map((device) => device.device);
}

test("sorted either way, what is not known comes last", () => {
  expect(numbers(NO_FILTER, "flops_per_s")).toEqual([1, 3, 2, 4]);
  expect(numbers(NO_FILTER, "flops_per_s", true)).toEqual([3, 1, 2, 4]);
  expect(numbers(NO_FILTER, "name")).toEqual([2, 1, 3, 4]);
});

test("filtered by kind, state and words", () => {
  expect(numbers({ text: "", kind: "phone", state: "ready" }, "device")).toEqual([3]);
  expect(numbers({ text: " SILENT ", kind: "", state: "" }, "device")).toEqual([4]);
  expect(numbers({ text: "", kind: "unknown", state: "" }, "device")).toEqual([4]);
});

test("the census counts everyone once, also who had no room in the reply", () => {
  const { kinds, states, counts } = census(OVERVIEW.crowds);
  expect(kinds).toEqual(["phone", "laptop", "unknown"]);
  expect(states).toEqual(["ready", "busy", "lost"]);
  const all = [...counts.values()].flatMap((row) => [...row.values()]);
  expect(all.reduce((a, b) => a + b)).toBe(OVERVIEW.devices_total);
  expect(counts.get("phone")?.get("busy")).toBe(1000);
});

test("shares of what is not known are not known", () => {
  expect(share(1, null)).toBeNull();
  expect(share(1, 4)).toBe(0.25);
});
