/** The compiled WASM kernels, as `npm run kernels` leaves them. */

import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import type { Product } from "../../src/kernels/kernel";
import type { Placed } from "../../src/kernels/wasm";
import { SCRATCH_BYTES, WasmMultiplier } from "../../src/kernels/wasm";
import { WasmMemory } from "../../src/kernels/wasm_memory";

/** One of the two modules. */
export function wasmModule(name: "own" | "shared"): WebAssembly.Module {
  const path = new URL(`../../src/kernels/matmul.${name}.wasm`, import.meta.url);
  return new WebAssembly.Module(readFileSync(fileURLToPath(path)));
}

/** A product with its matrices in a memory. */
export function placed(product: Product, memory: WasmMemory): Product<Placed> {
  const pairs = product.pairs.map(
    ([a, b]) =>
      [
        { ...a, pointer: memory.place(a.payload) },
        { ...b, pointer: memory.place(b.payload) },
      ] as const,
  );
  return { ...product, pairs };
}

/** A product by the WASM kernel on this thread. */
export function multiplyWasm(product: Product): Uint8Array {
  const memory = WasmMemory.create(2 ** 26, false);
  const multiplier = new WasmMultiplier(wasmModule("own"), memory.memory);
  const bytes = product.rows * product.columns * (product.out === "fp32" ? 4 : 2);
  const out = memory.take(bytes);
  const scratch = memory.take(SCRATCH_BYTES);
  multiplier.multiply(placed(product, memory), { from: 0, to: product.rows }, out, scratch);
  return memory.read(out, bytes);
}
