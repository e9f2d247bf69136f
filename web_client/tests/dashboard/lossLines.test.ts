import { expect, test } from "vitest";
import { EMPTY, reduce } from "../../src/dashboard/model";
import { readOverview } from "../../src/dashboard/overview";
import { lossLines } from "../../src/dashboard/views/lossLines";
import { job, overviewData, step } from "./example";

/** What is drawn of a job that has these records. */
function drawn(...records: Parameters<typeof job>[1]) {
  const overview = readOverview(overviewData({ job: job(0, records) }));
  const read = reduce(EMPTY, { kind: "overview", overview, received_s: 0 }).job;
  if (read === null) throw new Error("no job was read");
  return lossLines(read.step_records, read.eval_records, read.largest_difference);
}

const HELD_OUT = { event: "eval", step: 2, eval_loss: 4 };

test("a job that is compared with no run shows its own losses", () => {
  const lines = drawn(step(1), step(2), HELD_OUT);
  expect(lines.series.map(({ label }) => label)).toEqual(["step", "running mean", "held out"]);
  expect(lines.series.some(({ dashed }) => dashed)).toBe(false);
  expect(lines.data).toEqual([
    [1, 2],
    [10, 5],
    [10, 5],
    [null, 4],
  ]);
  expect(lines.summary).toBe("From 10.0000 at step 1 to 5.0000 at step 2.");
  expect(lines).not.toHaveProperty("note");
});

test("the compared run is a dashed line, and its losses can be read", () => {
  const lines = drawn(
    step(1, { against_loss: 10 }),
    step(2, { against_loss: 5.000006 }),
    HELD_OUT,
    step(3),
  );
  expect(lines.series.map(({ label, dashed = false }) => [label, dashed])).toEqual([
    ["this job", false],
    ["running mean", false],
    ["compared run", true],
    ["held out", false],
  ]);
  expect(lines.data[3]).toEqual([10, 5.000006, null]);
  expect(lines.data[4]).toEqual([null, 4, null]);
  const compared = lines.series[2];
  expect([0, 1, 2].map((index) => compared?.value(index))).toEqual(["10.0000", "5.0000", "–"]);
  expect(lines.note).toBe("largest difference 1.2e-6");
  expect(lines.summary).toBe(
    "From 10.0000 at step 1 to 3.3333 at step 3. " +
      "The compared run had 5.0000 at step 2; largest difference 1.2e-6.",
  );
});

test("a loss that went wrong in one of the runs is told", () => {
  const lines = drawn(step(1, { against_loss: 10 }), step(2, { against_loss: Number.NaN }));
  expect(lines.note).toBe("largest difference infinite");
  expect(lines.data[3]).toEqual([10, null]);
  expect(lines.summary).toContain("The compared run had not a number at step 2;");
});

test("other jobs are drawn next to this one, also beyond its last step", () => {
  const overview = readOverview(overviewData({ job: job(0, [step(1), step(2), step(4)]) }));
  const read = reduce(EMPTY, { kind: "overview", overview, received_s: 0 }).job;
  const others = [{ label: "job-1", steps: read?.step_records ?? [] }];
  const lines = lossLines(read?.step_records.slice(0, 2) ?? [], [], null, others);
  expect(lines.series.map(({ label }) => label)).toEqual(["this job", "running mean", "job-1"]);
  expect(lines.data).toEqual([
    [1, 2, 4],
    [10, 5, null],
    [10, 5, null],
    [10, 5, 2.5],
  ]);
});
