import { Worker } from "node:worker_threads";
import { afterEach, expect, test } from "vitest";
import { DType, itemBytes } from "../../src/kernels/kernel";
import { errorShare, randomProduct } from "../../src/kernels/reference";
import { SCRATCH_BYTES } from "../../src/kernels/wasm";
import { WasmMemory } from "../../src/kernels/wasm_memory";
import { seeded } from "./random";
import { placed, wasmModule } from "./wasm_modules";

/** What a thread does: its rows of one product, again and again, with scratch of its own. */
const THREAD = `
  const { parentPort, workerData: w } = require("node:worker_threads");
  const { exports } = new WebAssembly.Instance(w.module, { env: { memory: w.memory, abort() {} } });
  for (let i = 0; i < w.times; i++) {
    for (let column = 0; column < w.n; column += exports.BLOCK_COLUMNS.value) {
      const columns = Math.min(exports.BLOCK_COLUMNS.value, w.n - column);
      for (let row = w.from; row < w.to; row += exports.BLOCK_ROWS.value) {
        const rows = Math.min(exports.BLOCK_ROWS.value, w.to - row);
        exports.clear(w.scratch);
        exports.accumulate(w.a + row * w.k * 4, w.k, 1, w.b + column * 4, w.n, 1, 0,
          rows, columns, w.k, w.scratch);
        exports.finish(w.scratch, rows, columns, w.out + (row * w.n + column) * 4, w.n, 0);
      }
    }
  }
  parentPort.postMessage("done");
`;

const threads: Worker[] = [];
afterEach(async () => {
  await Promise.all(threads.splice(0).map((thread) => thread.terminate()));
});

test("two threads share one memory, each with scratch of its own", async () => {
  const product = randomProduct(251, 333, [300], DType.FP32, seeded(5));
  const memory = WasmMemory.create(2 ** 25, true);
  const pair = placed(product, memory).pairs[0];
  if (!pair) throw new Error("the product has a pair");
  const bytes = product.rows * product.columns * itemBytes(product.out);
  const out = memory.take(bytes);
  const module = wasmModule("shared");
  const half = 126;
  const done = [
    [0, half],
    [half, product.rows],
  ].map(([from, to]) => {
    const workerData = {
      module,
      memory: memory.memory,
      a: pair[0].pointer,
      b: pair[1].pointer,
      n: product.columns,
      k: 300,
      out,
      from,
      to,
      scratch: memory.take(SCRATCH_BYTES),
      times: 30,
    };
    const thread = new Worker(THREAD, { eval: true, workerData });
    threads.push(thread);
    return new Promise((resolve, reject) => {
      thread.once("message", resolve);
      thread.once("error", reject);
    });
  });
  await Promise.all(done);
  expect(errorShare(product, memory.read(out, bytes))).toBeLessThanOrEqual(1);
});
