import type { VNode } from "preact";
import { expect, test } from "vitest";
import { EMPTY, type Model, reduce } from "../../src/dashboard/model";
import { type Overview, readOverview } from "../../src/dashboard/overview";
import { Headline } from "../../src/dashboard/views/Headline";
import { tasksOf } from "../../src/dashboard/views/JobView";
import { job, overviewData, step } from "./example";

interface FigureProps {
  readonly name: string;
  readonly value: string;
  readonly note: string;
}

function figures(model: Model, overview: Overview): FigureProps[] {
  const section = Headline({ model, overview }) as VNode<{ children: VNode }>;
  const found = (section.props.children as VNode<{ children: VNode[] }>).props.children;
  return found.map(({ props }) => props as unknown as FigureProps);
}

/** The notes of the figures, by name. */
function notes(parts = {}): Map<string, string> {
  const found = figures(EMPTY, readOverview(overviewData(parts)));
  return new Map(found.map(({ name, note }) => [name, note]));
}

test("every rate says over what it is the mean, and what it is in proportion to", () => {
  expect(notes().get("Multiplying")).toBe("mean of 10.0 s, 1.00 TFLOP so far");
  expect(notes().get("To devices")).toBe("mean of 10.0 s, 0.8\u202f% of the card");
  expect(notes().get("From devices")).toBe("mean of 10.0 s");
});

test("a job that waits for devices has no time left", () => {
  const waits = { waits: "no device is connected; training waits for one" };
  expect(timeLeft(job(0, [step(1)]))).toEqual(["3 min 18 s", "running"]);
  expect(timeLeft(job(0, [step(1)], waits))).toEqual(["–", "waiting"]);
});

test("a job that resumes a run shows the step after which it continues", () => {
  const noteOfLoss = (more: Parameters<typeof job>[2]) => {
    const overview = readOverview(overviewData({ job: job(0, [], more) }));
    const model = reduce(EMPTY, { kind: "overview", overview, received_s: 0 });
    return figures(model, overview)[0]?.note;
  };
  expect(noteOfLoss({ step: 70 })).toBe("step 70 of 100");
  expect(noteOfLoss({ step: 0 })).toBe("no step yet");
  expect(noteOfLoss({})).toBe("no step yet"); // a server before this field
});

test("the step that is under way says how far it is", () => {
  expect(tasksOf([43, 96])).toBe("next: task 43 of 96");
  expect(tasksOf([43, 0])).toBe("next: task 43");
  expect(tasksOf(null)).toBeUndefined();
  expect(readOverview(overviewData({ job: job(0, [], { tasks: [4, 9] }) })).job?.tasks).toEqual([
    4, 9,
  ]);
  expect(readOverview(overviewData({ job: job(0, []) })).job?.tasks).toBeNull();
});

/** The figure and its note. */
function timeLeft(part: ReturnType<typeof job>): [string, string] {
  const overview = readOverview(overviewData({ job: part }));
  const model = reduce(EMPTY, { kind: "overview", overview, received_s: 0 });
  const found = figures(model, overview).find(({ name }) => name === "Time left");
  return [found?.value ?? "", found?.note ?? ""];
}

test("the busy devices are counted by the server, which may not list them all", () => {
  const by = [
    ["phone", "busy", 1500],
    ["laptop", "busy", 700],
    ["laptop", "ready", 1],
  ];
  const devices = { columns: ["device", "state"], rows: [[1, "busy"]], total: 2201, by };
  expect(notes({ devices }).get("Devices")).toBe("2\u202f200 busy");
});
