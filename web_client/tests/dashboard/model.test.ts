import { expect, test } from "vitest";
import { EMPTY, lacksDevices, type Model, question, reduce } from "../../src/dashboard/model";
import { readOverview } from "../../src/dashboard/overview";
import { MAX_POINTS } from "../../src/dashboard/series";
import { events, job, overviewData, step } from "./example";

function after(model: Model, parts: Parameters<typeof overviewData>[0]): Model {
  const overview = readOverview(overviewData(parts));
  return reduce(model, { kind: "overview", overview, received_s: 1 });
}

function range(from: number, to: number) {
  return Array.from({ length: to - from }, (_, index) => step(from + index));
}

test("a job's records add up, and the next question asks for what follows", () => {
  const once = after(EMPTY, { job: job(0, [step(1), step(2)]) });
  const twice = after(once, { job: job(2, [step(3), { event: "note", text: "saved" }]) });
  expect(twice.job?.step_records.map((record) => record.step)).toEqual([1, 2, 3]);
  expect(twice.job?.notes).toEqual(["saved"]);
  expect(question(twice)).toMatchObject({ after_record: 4, job: "" });
});

test.each([
  ["fleet", true],
  ["disk", false],
  ["servers", false],
])("whether a job waits for devices is known from what said so: %s", (event, expected) => {
  const waits = "No space left on device";
  const waiting = after(EMPTY, { job: job(0, [{ event, text: waits }], { waits }) });
  const still = after(waiting, { job: job(1, [{ event: "note", text: "saved" }], { waits }) });
  const paused = after(still, { job: job(2, [], { waits: "paused" }) });
  const lacks = [waiting, still, paused].map((each) => each.job && lacksDevices(each.job));
  expect(lacks).toEqual([expected, expected, false]);
});

test("records that were read already, or a gap, are not taken in", () => {
  const once = after(EMPTY, { job: job(0, [step(1), step(2)]) });
  const again = after(once, { job: job(0, [step(1), step(2)]) });
  expect(again.job?.step_records.length).toBe(2);
  const gap = after(once, { job: job(9, [step(10)]) });
  expect(gap.job?.step_records).toEqual([]);
  expect(gap.behind).toBe(true);
  expect(question(gap)).toMatchObject({ after_record: 0 });
});

test("another job starts at its first record", () => {
  const once = after(EMPTY, { job: job(0, [step(1), step(2)]) });
  const other = after(once, { job: job(2, [step(3)], { job: "j2" }) });
  expect(other.job).toMatchObject({ job: "j2", step_records: [], next_record: 0 });
  expect(other.behind).toBe(true);
  const caughtUp = after(other, { job: job(0, range(1, 4), { job: "j2" }) });
  expect(caughtUp.job?.step_records.length).toBe(3);
  expect(caughtUp.behind).toBe(false);
});

test("a reply that the server cut, however short, says that more wait", () => {
  const note = { event: "note", text: "resumed" };
  const cut = after(EMPTY, { job: job(0, [note, ...range(1, 400)], { last_step: step(1000) }) });
  expect(cut.behind).toBe(true);
  const next = after(cut, { job: job(400, range(400, 900), { last_step: step(1001) }) });
  expect(next.behind).toBe(true);
  const all = after(next, { job: job(900, range(900, 1002), { last_step: step(1001) }) });
  expect(all.behind).toBe(false);
});

test("whoever has the latest step waits for the next", () => {
  const full = after(EMPTY, { job: job(0, range(1, 501), { last_step: step(500) }) });
  expect(full.behind).toBe(false);
  const early = after(EMPTY, { job: job(0, [{ event: "note", text: "loading" }]) });
  expect(early.behind).toBe(false);
});

test("a server that sends nothing of what it has is not asked without end", () => {
  const once = after(EMPTY, { job: job(0, [step(1)], { last_step: step(1) }) });
  expect(after(once, { job: job(1, [], { last_step: step(2) }) }).behind).toBe(false);
});

test("a long run keeps a bounded number of points, its first and its newest among them", () => {
  let model = EMPTY;
  for (let first = 0; first < 20_000; first += 500)
    model = after(model, { job: job(first, range(first + 1, first + 501)) });
  const steps = model.job?.step_records.map((record) => record.step) ?? [];
  expect(steps.length).toBeLessThanOrEqual(MAX_POINTS);
  expect(steps[0]).toBe(1);
  expect(steps.slice(-1000)).toEqual(range(19_001, 20_001).map((record) => record.step));
});

test("the largest difference from the compared run is of all steps, also of those not kept", () => {
  let model = after(EMPTY, { job: job(0, [step(1, { against_loss: 10 })]) });
  expect(model.job?.largest_difference).toBe(0);
  model = after(model, { job: job(1, [step(2, { loss: 6, against_loss: 4 })]) });
  for (let first = 2; first < 10_002; first += 500)
    model = after(model, { job: job(first, range(first + 1, first + 501)) });
  expect(model.job?.step_records.some((record) => record.step === 2)).toBe(false);
  expect(model.job?.largest_difference).toBe(0.5);
  const other = after(model, { job: job(0, [step(1)], { job: "j2" }) });
  expect(other.job?.largest_difference).toBeNull();
});

test("events come once each, and the next question asks for later ones", () => {
  const once = after(EMPTY, { events: events(1, 2) });
  const twice = after(once, { events: events(2, 3) });
  expect(twice.events.map((event) => event.id)).toEqual([1, 2, 3]);
  expect(question(twice)).toMatchObject({ after_event: 3 });
});

test("a restarted server is read from its beginning", () => {
  const before = after(EMPTY, { events: events(1, 2), job: job(0, [step(1)]) });
  const server = {
    version: "0.1",
    started_s: 2000,
    now_s: 2001,
    verify: "",
    name: "",
    servers: [],
  };
  const restarted = after(before, { server, events: { columns: [], rows: [], last: 1 } });
  expect(restarted.events).toEqual([]);
  expect(restarted.samples.length).toBe(1);
  expect(question(restarted)).toMatchObject({ after_event: 0, after_record: 0 });
  expect(restarted.behind).toBe(true);
});

test("without a server the last figures stay", () => {
  const seen = after(EMPTY, {});
  const gone = reduce(seen, { kind: "link", state: { kind: "waiting", retry_s: 1 } });
  expect(gone.overview).toBe(seen.overview);
  expect(gone.received_s).toBe(1);
});

test("finished GEMMs are kept once each", () => {
  const once = after(EMPTY, { gemms: [[1, "a", 1, 2]] });
  const twice = after(once, {
    gemms: [
      [1, "a", 1, 2],
      [2, "b", 1, 1],
    ],
  });
  expect(twice.gemms.map((gemm) => gemm.generation)).toEqual([1, 2]);
});

test("choosing a device twice chooses none", () => {
  const chosen = reduce(EMPTY, { kind: "choose", device: 4 });
  expect(question(chosen)).toMatchObject({ device: 4, stream: true });
  expect(reduce(chosen, { kind: "choose", device: 4 }).chosen).toBe(0);
});
