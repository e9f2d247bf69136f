import { expect, test } from "vitest";
import { Allocator } from "../../src/kernels/allocator";
import { seeded } from "./random";

test("spans never overlap, and all that was freed can be taken again", () => {
  const random = seeded(3);
  const allocator = new Allocator(100, 100_000);
  const taken = new Map<number, number>();
  for (let i = 0; i < 5000; i++) {
    if (random() < 0.55) {
      const bytes = Math.floor(random() * 3000);
      const address = allocator.take(bytes);
      if (address === null) continue;
      expect(address % 16).toBe(0);
      expect(address).toBeGreaterThanOrEqual(100);
      expect(address + bytes).toBeLessThanOrEqual(100_000);
      for (const [other, length] of taken) {
        expect(address >= other + length || address + bytes <= other).toBe(true);
      }
      taken.set(address, Math.max(bytes, 1));
    } else {
      const some = [...taken.keys()][Math.floor(random() * taken.size)];
      if (some === undefined) continue;
      allocator.give(some);
      taken.delete(some);
    }
  }
  for (const address of taken.keys()) allocator.give(address);
  expect(allocator.taken_bytes).toBe(0);
  expect(allocator.take(99_800)).not.toBeNull();
});

test("growing adds to what is free", () => {
  const allocator = new Allocator(0, 64);
  expect(allocator.take(64)).toBe(0);
  expect(allocator.take(1)).toBeNull();
  allocator.extend(160);
  expect(allocator.take(96)).toBe(64);
  expect(() => allocator.give(48)).toThrow(RangeError);
});
