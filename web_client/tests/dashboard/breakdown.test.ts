import { expect, test } from "vitest";
import { bottleneck, serverParts } from "../../src/dashboard/breakdown";
import { readRecords, type StepRecord } from "../../src/dashboard/records";
import { step } from "./example";

const DEVICES = [
  { name: "laptop", compute_s: 20, down_s: 5, up_s: 30 },
  { name: "desktop", compute_s: 22, down_s: 4, up_s: 10 },
];
const PARTS = { wall_s: 40, ps_s: 8, loss_s: 4.5, sums_s: 1, optimizer_s: 2, audit_s: 0 };

function read(more: Record<string, unknown>): StepRecord {
  return readRecords([step(2, { ...PARTS, devices: DEVICES, ...more })])[0] as StepRecord;
}

test("the part that takes longest is named", () => {
  expect(bottleneck(read({}))).toBe("Bottleneck: the uplink of laptop takes 30.0 s of 40.0 s.");
  expect(bottleneck(read({ ps_s: 36 }))).toContain("the server's own work takes 36.0 s");
  expect(bottleneck(read({ wall_s: 80 }))).toContain("No part takes most of the step");
});

test("the server's parts are its work, the longest first", () => {
  expect(serverParts(read({}))).toEqual([
    ["the loss", 4.5],
    ["the optimizer", 2],
    ["adding gradients", 1],
    ["other work", 0.5],
  ]);
});

test("a step without stages, or of an older server, has no devices and no bottleneck", () => {
  for (const devices of [undefined, [], "x", [null, 3]]) {
    const record = read({ devices });
    expect(record.devices).toEqual([]);
    expect(bottleneck(record)).toBe("");
  }
});
