import { expect, test } from "vitest";
import type { Stream } from "../../src/dashboard/overview";
import { namesPx, shortened, spanAt } from "../../src/dashboard/views/drawStream";

const SPAN = { lane: "receive", start_s: -10, end_s: -5 } as const;
const STREAM: Stream = { window_s: 20, devices: [{ device: 1, spans: [SPAN] }], hidden: 0 };
const SIZE = { width: 1000, height: 60 };

test("names have the room that the longest needs, and no more than their share", () => {
  const wide = namesPx(SIZE, STREAM, () => "snapdragon-8-gen-2-14");
  expect(shortened("snapdragon-8-gen-2-14", wide)).toBe("snapdragon-8-gen-2-14");
  expect(namesPx(SIZE, STREAM, () => "phone")).toBeLessThan(wide);
  expect(namesPx({ width: 300, height: 60 }, STREAM, () => "x".repeat(500))).toBe(120);
});

test("where there is no room the end of a name stays, in which devices differ", () => {
  expect(shortened("snapdragon-8-gen-2-14", 120)).toBe("snapdrago…n-2-14");
  expect(shortened("phone", 120)).toBe("phone");
});

test("a span is found where it was drawn", () => {
  const left = namesPx(SIZE, STREAM, () => "phone");
  const middle = left + (SIZE.width - left) * 0.6;
  expect(spanAt(middle, 1, SIZE, STREAM, () => "phone")?.device).toBe(1);
  expect(spanAt(left + 1, 1, SIZE, STREAM, () => "phone")).toBeNull();
});
