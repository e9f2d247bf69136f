import { expect, test } from "vitest";
import { count, duration, quantity } from "../../src/ui/figures";

test("quantities have three digits and a prefix", () => {
  expect(quantity(0, "B")).toBe("0 B");
  expect(quantity(999, "B")).toBe("999 B");
  expect(quantity(999.6e3, "B")).toBe("1.00 MB");
  expect(quantity(12_345_678, "B")).toBe("12.3 MB");
  expect(quantity(4.2e10, "FLOP/s")).toBe("42.0 GFLOP/s");
  expect(quantity(null, "B")).toBe("–");
});

test("counts and spans of time", () => {
  expect(count(1234567)).toBe("1\u202f234\u202f567");
  expect(duration(59)).toBe("59 s");
  expect(duration(3725)).toBe("1 h 2 min");
});
