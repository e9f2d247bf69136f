/** A thread that multiplies: what it is told, in the order in which it is told. */

import { itemBytes, type Matrix, type Product } from "./kernel";
import { multiplyPlain } from "./plain";
import { type Placed, SCRATCH_BYTES, WasmMultiplier } from "./wasm";
import { WasmMemory } from "./wasm_memory";
import type { Answer, Named, Order } from "./worker_messages";

/** Matrices in this thread, and how to multiply them. */
interface Store {
  hold(matrix: Named, payload: Uint8Array): void;
  forget(key: number): void;
  multiply(product: Product<Named>): Uint8Array;
}

class PlainStore implements Store {
  readonly #matrices = new Map<number, Matrix>();

  hold({ key, rows, columns, dtype }: Named, payload: Uint8Array): void {
    this.#matrices.set(key, { rows, columns, dtype, payload });
  }

  forget(key: number): void {
    this.#matrices.delete(key);
  }

  multiply(product: Product<Named>): Uint8Array {
    const find = ({ key }: Named) => found(this.#matrices, key);
    return multiplyPlain({
      ...product,
      pairs: product.pairs.map(([a, b]) => [find(a), find(b)] as const),
    });
  }
}

class WasmStore implements Store {
  readonly #matrices = new Map<number, Placed>();
  readonly #memory: WasmMemory;
  readonly #multiplier: WasmMultiplier;
  readonly #scratch: number;

  constructor(module: WebAssembly.Module, max_bytes: number) {
    this.#memory = WasmMemory.create(max_bytes, false);
    this.#scratch = this.#memory.take(SCRATCH_BYTES);
    this.#multiplier = new WasmMultiplier(module, this.#memory.memory);
  }

  hold({ key, rows, columns, dtype }: Named, payload: Uint8Array): void {
    this.#matrices.set(key, { rows, columns, dtype, pointer: this.#memory.place(payload) });
  }

  forget(key: number): void {
    const matrix = this.#matrices.get(key);
    if (!matrix) return;
    this.#matrices.delete(key);
    this.#memory.give(matrix.pointer);
  }

  multiply(product: Product<Named>): Uint8Array {
    const find = ({ key }: Named) => found(this.#matrices, key);
    const pairs = product.pairs.map(([a, b]) => [find(a), find(b)] as const);
    const bytes = product.rows * product.columns * itemBytes(product.out);
    const out = this.#memory.take(bytes);
    try {
      const rows = { from: 0, to: product.rows };
      this.#multiplier.multiply({ ...product, pairs }, rows, out, this.#scratch);
      return this.#memory.read(out, bytes);
    } finally {
      this.#memory.give(out);
    }
  }
}

function found<M>(matrices: ReadonlyMap<number, M>, key: number): M {
  const matrix = matrices.get(key);
  if (matrix === undefined) throw new Error(`matrix ${key} is not in this thread`);
  return matrix;
}

let store: Store | null = null;
let shared: { multiplier: WasmMultiplier; scratch: number } | null = null;
/** Matrices that could not be held: products of them fail, and say why. */
const refused = new Map<number, string>();

function answer(job: number, multiply: () => Uint8Array | null): void {
  let said: Answer;
  try {
    const payload = multiply();
    said = { job, payload, reason: null };
    postMessage(said, payload ? { transfer: [payload.buffer] } : {});
  } catch (error) {
    said = { job, reason: String(error) };
    postMessage(said);
  }
}

addEventListener("message", ({ data: order }: MessageEvent<Order>) => {
  switch (order.kind) {
    case "js":
      store = new PlainStore();
      break;
    case "wasm":
      store = new WasmStore(order.module, order.max_bytes);
      break;
    case "shared":
      shared = {
        multiplier: new WasmMultiplier(order.module, order.memory),
        scratch: order.scratch,
      };
      break;
    case "hold":
      try {
        store?.hold(order.matrix, order.payload);
      } catch (error) {
        refused.set(order.matrix.key, String(error));
      }
      break;
    case "forget":
      refused.delete(order.key);
      store?.forget(order.key);
      break;
    case "multiply":
      answer(order.job, () => {
        for (const { key } of order.product.pairs.flat()) {
          const reason = refused.get(key);
          if (reason) throw new Error(reason);
        }
        return (store as Store).multiply(order.product);
      });
      break;
    case "rows":
      answer(order.job, () => {
        if (!shared) throw new Error("this thread shares no memory");
        shared.multiplier.multiply(order.product, order.rows, order.out, shared.scratch);
        return null;
      });
      break;
  }
});
