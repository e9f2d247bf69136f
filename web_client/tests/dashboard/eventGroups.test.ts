import { expect, test } from "vitest";
import { grouped } from "../../src/dashboard/eventGroups";
import type { FleetEvent } from "../../src/dashboard/overview";

function event(id: number, kind: string, device: number | null): FleetEvent {
  return { id, time_s: 1000 + id, kind, device, text: `${kind} ${device ?? "-"}` };
}

test("what one device does again and again is one line, where it did it last", () => {
  const events = [
    event(1, "overdue", 7),
    event(2, "join", 8),
    event(3, "overdue", 7),
    event(4, "job", null),
    event(5, "job", 0),
    event(8, "job", 0),
    event(6, "overdue", 8),
    event(7, "overdue", 7),
  ];
  const groups = grouped(events);
  expect(groups.map(({ newest, count }) => [newest.id, count])).toEqual([
    [7, 3],
    [6, 1],
    [8, 1],
    [5, 1],
    [4, 1],
    [2, 1],
  ]);
  expect(groups[0]?.since_s).toBe(1001);
  expect(grouped([])).toEqual([]);
});
