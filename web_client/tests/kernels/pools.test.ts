import { beforeEach, expect, test } from "vitest";
import { Crew, type Thread } from "../../src/kernels/crew";
import { DType, type Kernel, KernelName, type Matrix } from "../../src/kernels/kernel";
import { OwnPool } from "../../src/kernels/own_pool";
import { SharedPool } from "../../src/kernels/shared_pool";
import { WasmMemory } from "../../src/kernels/wasm_memory";
import type { Answer, Order } from "../../src/kernels/worker_messages";
import { settled } from "../device/fakes";
import { wasmModule } from "./wasm_modules";

/** A thread that answers, in order, when a test says so. */
class FakeThread implements Thread {
  onmessage: ((event: MessageEvent<Answer>) => void) | null = null;
  onerror: ((event: ErrorEvent) => void) | null = null;
  readonly asked: number[] = [];

  postMessage(order: Order): void {
    if (order.kind === "multiply" || order.kind === "rows") this.asked.push(order.job);
  }

  terminate(): void {
    this.asked.length = 0;
  }

  /** It is done with the first thing that it was asked. */
  answer(): void {
    const job = this.asked.shift();
    if (job === undefined) throw new Error("this thread was asked nothing");
    const data: Answer = { job, payload: new Uint8Array(4), reason: null };
    this.onmessage?.({ data } as MessageEvent<Answer>);
  }
}

let now_s: number;
let threads: FakeThread[];

beforeEach(() => {
  now_s = 100;
  threads = [];
});

function crew(count: number): Crew {
  const spawn = () => {
    const thread = new FakeThread();
    threads.push(thread);
    return thread;
  };
  return new Crew(count, spawn, () => now_s);
}

const POOLS: [string, (count: number) => Kernel][] = [
  ["own", (count) => new OwnPool(KernelName.WASM, "", crew(count), { kind: "js" })],
  [
    "shared",
    (count) => new SharedPool(crew(count), wasmModule("shared"), WasmMemory.create(2 ** 26, true)),
  ],
];

/** Ask for products so small that each is one thread's; what they say of their time comes later. */
function ask(pool: Kernel, count: number): number[] {
  const matrix = (): Matrix => {
    const made = { rows: 1, columns: 1, dtype: DType.FP32, payload: new Uint8Array(4) };
    pool.hold(made);
    return made;
  };
  const stated: number[] = [];
  for (let i = 0; i < count; i++) {
    const shape = { rows: 1, columns: 1, out: DType.FP32, transposeA: false, transposeB: false };
    void pool
      .multiply({ pairs: [[matrix(), matrix()]], ...shape }, () => true)
      .then((outcome) => {
        stated.push(outcome?.compute_s ?? Number.NaN);
      });
  }
  return stated;
}

function sum(values: readonly number[]): number {
  return values.reduce((total, value) => total + value, 0);
}

test.each(POOLS)("%s: products of threads at once share the time", async (_, make) => {
  const stated = ask(make(4), 4);
  now_s += 0.2;
  for (const thread of threads) thread.answer();
  await settled();
  expect(stated.length).toBe(4);
  for (const compute_s of stated) expect(compute_s).toBeCloseTo(0.05);
});

test.each(POOLS)("%s: a product is not computed while it waits for a thread", async (_, make) => {
  const stated = ask(make(1), 3);
  for (const took_s of [0.5, 0.25, 1]) {
    now_s += took_s;
    threads[0]?.answer();
    await settled();
  }
  expect(stated.map((compute_s) => compute_s.toFixed(6))).toEqual([
    "0.500000",
    "0.250000",
    "1.000000",
  ]);
});

test.each(POOLS)("%s: all times add up to that in which any thread computes", async (_, make) => {
  const pool = make(2);
  const first = ask(pool, 2);
  now_s += 5;
  threads[1]?.answer();
  now_s += 3; // the other one alone
  threads[0]?.answer();
  await settled();
  expect(first[0]).toBeCloseTo(2.5);
  expect(first[1]).toBeCloseTo(5.5);
  now_s += 100; // nothing to do
  const second = ask(pool, 1);
  now_s += 1;
  threads.find(({ asked }) => asked.length > 0)?.answer();
  await settled();
  expect(sum([...first, ...second])).toBeCloseTo(9);
});

test("a product split among threads takes as long as all of it", async () => {
  const pool = POOLS[1]?.[1](2) as Kernel;
  const side = 512;
  const payload = new Uint8Array(4 * side * side);
  const matrix = { rows: side, columns: side, dtype: DType.FP32, payload };
  pool.hold(matrix);
  const shape = { rows: side, columns: side, out: DType.FP32 };
  const product = { pairs: [[matrix, matrix] as const], ...shape };
  const done = pool.multiply({ ...product, transposeA: false, transposeB: false }, () => true);
  expect(threads.map(({ asked }) => asked.length)).toEqual([2, 2]);
  for (const took_s of [1, 2]) {
    now_s += took_s;
    for (const thread of threads) thread.answer();
  }
  expect((await done)?.compute_s).toBeCloseTo(3);
});
