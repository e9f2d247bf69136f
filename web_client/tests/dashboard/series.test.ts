import { expect, test } from "vitest";
import { type EvalRecord, readRecords, type StepRecord } from "../../src/dashboard/records";
import {
  largestDifference,
  lossSeries,
  pace,
  scaleTop,
  smooth,
  timeSeries,
} from "../../src/dashboard/series";
import { busyShare, busyWithin, extent } from "../../src/dashboard/timeline";
import { step } from "./example";

const STEPS = readRecords([step(1), step(2, { loss: Number.NaN }), step(3)]) as StepRecord[];
const EVALS = readRecords([{ event: "eval", step: 2, eval_loss: 4 }]) as EvalRecord[];

test("shares of a given time; what began before it counts from its start", () => {
  const spans = [
    { lane: "compute", start_s: -40, end_s: -25 },
    { lane: "compute", start_s: -10, end_s: -5 },
    { lane: "send", start_s: -5, end_s: 0 },
  ] as const;
  const shares = busyWithin(spans, -30, 0);
  expect(shares.compute).toBeCloseTo(10 / 30);
  expect(shares.send).toBeCloseTo(5 / 30);
  expect(shares.receive).toBe(0);
});

test("losses by step; what is no number is a gap", () => {
  expect(lossSeries(STEPS, EVALS)).toEqual([
    [1, 2, 3],
    [10, null, 10 / 3],
    [null, 4, null],
    [null, null, null],
  ]);
  const compared = [
    step(1, { against_loss: 9 }),
    step(2),
    step(3, { against_loss: Number.NaN }),
    step(4, { against_loss: 2 }),
  ];
  const [, , , against] = lossSeries(readRecords(compared) as StepRecord[], EVALS);
  expect(against).toEqual([9, null, null, 2]);
});

/** The largest difference of steps, each with its loss and that of the compared run. */
function largest(known: number | null, ...losses: (readonly [number, number | null])[]) {
  const steps = losses.map(([loss, against_loss], i) => step(i + 1, { loss, against_loss }));
  return largestDifference(known, readRecords(steps) as StepRecord[]);
}

test("the largest difference is a share of the compared run's loss", () => {
  expect(largest(null, [4, null], [5, 4], [3, 4], [2, 2])).toBe(0.25);
  expect(largest(0.5, [5, 4])).toBe(0.5);
  expect(largest(null, [2, 2])).toBe(0);
});

test("nothing is compared without the other run's loss, or with one of 0", () => {
  expect(largestDifference(null, STEPS)).toBeNull();
  expect(largest(0.1, [3, null], [3, 0])).toBe(0.1);
});

test("one loss that is no number, of the two, is no small difference", () => {
  for (const wrong of [Number.NaN, Number.POSITIVE_INFINITY]) {
    expect(largest(0.1, [wrong, 4], [4, 4])).toBe(Number.POSITIVE_INFINITY);
    expect(largest(0.1, [4, wrong])).toBe(Number.POSITIVE_INFINITY);
    expect(largest(0.1, [wrong, wrong])).toBe(0.1);
  }
});

test("step time is stacked", () => {
  expect(timeSeries(STEPS)).toEqual([
    [1, 2, 3],
    [0.5, 0.5, 0.5],
    [2, 2, 2],
  ]);
});

test("the pace is that of the last ten steps", () => {
  const slow = Array.from({ length: 10 }, (_, index) => step(index + 1, { wall_s: 100 }));
  const fast = Array.from({ length: 10 }, (_, index) => step(index + 11));
  expect(pace(readRecords([...slow, ...fast]) as StepRecord[], 50)).toEqual({
    steps: 10,
    step_s: 2,
    ps_s: 0.5,
    fleet_s: 1.5,
    tokens_per_s: 256,
    left_s: 60,
    traffic_ratio: 2,
  });
  expect(pace([], 50)).toBeNull();
  expect(pace(STEPS, null)?.left_s).toBeNull();
});

test("a step that waited for devices changes neither the pace nor the scale", () => {
  const steps = Array.from({ length: 9 }, (_, index) => step(index + 1));
  const records = readRecords([...steps, step(10, { wall_s: 900, fleet_s: 898 })]) as StepRecord[];
  expect(pace(records, 20)?.step_s).toBe(2);
  expect(pace(records, 20)?.left_s).toBe(20);
  expect(scaleTop(timeSeries(records)[2])).toBe(12);
  expect(scaleTop([])).toBe(Number.POSITIVE_INFINITY);
});

test("a running mean skips gaps", () => {
  expect(smooth([1, null, 3])).toEqual([1, null, 3]);
  const noisy = Array.from({ length: 200 }, (_, index) => (index % 2 === 0 ? 0 : 2));
  expect(smooth(noisy).at(-1)).toBeCloseTo(1);
});

test("time that overlaps is busy once", () => {
  const spans = [
    { lane: "receive" as const, start_s: 0, end_s: 4 },
    { lane: "receive" as const, start_s: 2, end_s: 5 },
    { lane: "send" as const, start_s: 9, end_s: 10 },
  ];
  expect(extent(spans)).toEqual({ start_s: 0, end_s: 10 });
  expect(busyShare(spans)).toEqual({ receive: 0.5, compute: 0, send: 0.1 });
});
