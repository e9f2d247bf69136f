import { expect, test } from "vitest";
import { readOverview } from "../../src/dashboard/overview";
import { doing, inFlight, layersOf, progressOf, readStages } from "../../src/dashboard/stages";
import { overviewData } from "./example";

const FIRST = {
  first: 0,
  stop: 4,
  loss: false,
  forward: 6,
  backward: 2,
  landed: 0,
  devices: 2,
  holders: [
    [1, 2, 0, 1, 0],
    [2, 0, 1, 1, 0],
  ],
};
const LAST = {
  first: 4,
  stop: 5,
  loss: true,
  forward: 4,
  backward: 4,
  landed: 0,
  devices: 1,
  holders: [[3, 0, 0, 0, 4]],
};
const STEP = { batches: 8, ended: false, repeated: 1, logged: 3, stages: [FIRST, LAST] };

test("no step by stages is none", () => {
  expect(readOverview(overviewData()).stages).toBeNull();
  expect(readStages(undefined)).toBeNull();
});

test("stages, who holds them and what they do have names", () => {
  const step = readOverview(overviewData({ stages: STEP })).stages;
  expect(step).toMatchObject({ batches: 8, ended: false, repeated: 1, logged: 3 });
  expect(step?.stages.map(layersOf)).toEqual(["layers 1 to 4", "layer 5 and the loss"]);
  expect(step?.stages[0]?.holders[1]).toEqual({
    device: 2,
    forward: 0,
    backward: 1,
    summed: 1,
    coming: 0,
  });
  expect(step?.stages.map((stage) => stage.holders.map(doing))).toEqual([
    ["2 forward; 1 summed", "1 backward; 1 summed"],
    ["nothing in flight; sends its sums"],
  ]);
});

test("slices of the loss have no layers", () => {
  const slices = [0, 1].map((part) => ({ ...LAST, first: 5, loss: false, slice: [part, 2] }));
  const step = readStages({ ...STEP, stages: [FIRST, ...slices] });
  expect(step?.stages.map(layersOf)).toEqual([
    "layers 1 to 4",
    "slice 1 of 2 of the loss",
    "slice 2 of 2 of the loss",
  ]);
  expect(step?.stages[0]?.slice).toBeNull();
  const loss = readStages({ ...STEP, stages: [FIRST, { ...LAST, first: 5 }] });
  expect(loss?.stages.map(layersOf)).toEqual(["layers 1 to 4", "the loss"]);
});

test("what is in flight, and how much of the step is done", () => {
  const step = readStages(STEP);
  if (step === null) throw new Error("it is a step");
  expect(inFlight(step)).toBe(3);
  expect(progressOf(step)).toBeCloseTo((6 + 2 + 4 + 4) / (3 * 8 * 2));
  const stages = step.stages.map((stage) => ({ ...stage, forward: 8, backward: 8, landed: 8 }));
  expect(progressOf({ ...step, stages })).toBe(1);
  expect(progressOf({ ...step, stages: [] })).toBe(0);
});

test("of more devices than a reply has room for the number is known", () => {
  const step = readStages({ ...STEP, stages: [{ ...FIRST, devices: 3000 }] });
  expect(step?.stages[0]).toMatchObject({ devices: 3000 });
  expect(step?.stages[0]?.holders.length).toBe(2);
});

test("a step of another shape does no harm", () => {
  const step = readStages({ stages: [null, { holders: [[], 3] }] });
  expect(step?.batches).toBe(0);
  expect(step?.stages.map((stage) => stage.holders.length)).toEqual([0, 2]);
});
