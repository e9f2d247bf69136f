import { expect, test } from "vitest";
import { FakeGpu } from "./fake_gpu";

const numbers = (...items: number[]) => Float32Array.from(items);

test("numbers come back as they went, all or some of them, until they are freed", async () => {
  const gpu = new FakeGpu();
  const array = await gpu.memory.make(5, numbers(1, 2, 3, 4, 5));
  expect([...(await array!.read())]).toEqual([1, 2, 3, 4, 5]);
  expect([...(await array!.part(1, 3))]).toEqual([2, 3]);
  expect([...(await array!.part(2, 2))]).toEqual([]);
  expect(gpu.downloaded_bytes).toBe(4 * (5 + 2));
  array!.free();
  expect(gpu.living.size).toBe(0);
  await expect(array!.read()).rejects.toThrow("destroyed");
  expect(gpu.living.size).toBe(0);
});

test("an array without numbers has zeros, and nothing is uploaded", async () => {
  const gpu = new FakeGpu();
  const array = await gpu.memory.make(3);
  expect([...(await array!.read())]).toEqual([0, 0, 0]);
  expect(gpu.uploaded_bytes).toBe(0);
});

test("no array is made without memory for it, and none without elements", async () => {
  const gpu = new FakeGpu();
  gpu.room_bytes = 32;
  const first = await gpu.memory.make(4);
  expect(first).not.toBeNull();
  expect(await gpu.memory.make(5, numbers(1, 2, 3, 4, 5))).toBeNull();
  expect(await gpu.memory.make(0)).toBeNull();
  expect(gpu.living_bytes).toBe(16);
  first!.free();
  expect(await gpu.memory.make(5)).not.toBeNull();
});
