import type { VNode } from "preact";
import { expect, test } from "vitest";
import { EMPTY } from "../../src/dashboard/model";
import { readOverview } from "../../src/dashboard/overview";
import { Headline } from "../../src/dashboard/views/Headline";
import { overviewData } from "./example";

/** The notes of the figures, by name. */
function notes(parts = {}): Map<string, string> {
  const overview = readOverview(overviewData(parts));
  const section = Headline({ model: EMPTY, overview }) as VNode<{ children: VNode }>;
  const figures = (section.props.children as VNode<{ children: VNode[] }>).props.children;
  return new Map(
    figures.map(({ props }) => {
      const { name, note } = props as unknown as { name: string; note: string };
      return [name, note];
    }),
  );
}

test("every rate says over what it is the mean, and what it is in proportion to", () => {
  expect(notes().get("Multiplying")).toBe("mean of 10.0 s, 1.00 TFLOP so far");
  expect(notes().get("Egress")).toBe("mean of 10.0 s, 0.8\u202f% of the card");
  expect(notes().get("Ingress")).toBe("mean of 10.0 s, card's rate not stated");
});

test("the busy devices are counted by the server, which may not list them all", () => {
  const by = [
    ["phone", "busy", 1500],
    ["laptop", "busy", 700],
    ["laptop", "ready", 1],
  ];
  const devices = { columns: ["device", "state"], rows: [[1, "busy"]], total: 2201, by };
  expect(notes({ devices }).get("Devices")).toBe("2\u202f200 busy");
});
