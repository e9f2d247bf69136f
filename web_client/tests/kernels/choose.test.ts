import { beforeEach, expect, test } from "vitest";
import { type Chosen, chooseKernel, type Surroundings } from "../../src/kernels/choose";
import type { Thread } from "../../src/kernels/crew";
import { KernelName, type Matrix } from "../../src/kernels/kernel";
import { multiplyPlain } from "../../src/kernels/plain";
import type { Answer, Order } from "../../src/kernels/worker_messages";
import { seeded } from "./random";
import { wasmModule } from "./wasm_modules";

const { WEBGPU, WASM, JS } = KernelName;

/** Which kernels get the last number of every product wrong, and what was said of each. */
let wrong: KernelName[];
let unused: [KernelName, string][];
let ended: KernelName[];

beforeEach(() => {
  [wrong, unused, ended] = [[], [], []];
});

/** A thread that multiplies at once, whatever kind it is told to be. */
class OwnThread implements Thread {
  onmessage: ((event: MessageEvent<Answer>) => void) | null = null;
  onerror: ((event: ErrorEvent) => void) | null = null;
  readonly #matrices = new Map<number, Matrix>();
  #kernel = JS;

  postMessage(order: Order): void {
    if (order.kind === "wasm") this.#kernel = WASM;
    else if (order.kind === "hold") {
      this.#matrices.set(order.matrix.key, { ...order.matrix, payload: order.payload });
    } else if (order.kind === "multiply") {
      const find = ({ key }: { key: number }) => this.#matrices.get(key) as Matrix;
      const pairs = order.product.pairs.map(([a, b]) => [find(a), find(b)] as const);
      const payload = multiplyPlain({ ...order.product, pairs });
      const last = payload.length - 1;
      if (wrong.includes(this.#kernel)) payload[last] = (payload[last] as number) ^ 1;
      const data: Answer = { job: order.job, payload, reason: null };
      queueMicrotask(() => this.onmessage?.({ data } as MessageEvent<Answer>));
    }
  }

  terminate(): void {
    ended.push(this.#kernel);
  }
}

function choose(): Promise<Chosen> {
  let now_s = 0;
  const around: Surroundings = {
    gpu: undefined,
    softwareGpu: false,
    isolated: false,
    threads: 1,
    memory_bytes: 2 ** 20,
    spawn: () => new OwnThread(),
    module: async () => wasmModule("own"),
    random: seeded(4),
    now_s: () => ++now_s,
  };
  return chooseKernel([WEBGPU, WASM, JS], around, (name, why) => unused.push([name, why]));
}

test("the first that is there and right is used", async () => {
  expect((await choose()).kernel.name).toBe(WASM);
  expect(unused).toEqual([[WEBGPU, "Error: this browser has no WebGPU here"]]);
});

test("a kernel whose numbers are wrong is not used, and said to be", async () => {
  wrong = [WASM];
  expect((await choose()).kernel.name).toBe(JS);
  expect(unused.at(-1)).toEqual([WASM, "Error: its results are wrong"]);
  expect(ended).toEqual([WASM]);
});

test("where none is right there is no device", async () => {
  wrong = [WASM, JS];
  await expect(choose()).rejects.toThrow("none of webgpu, wasm, js multiplies correctly");
  expect(ended).toEqual([WASM, JS]);
});
