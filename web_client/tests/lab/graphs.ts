/** Graphs on a GPU alone, beside the processor. */

import * as onnx from "onnxruntime-web/webgpu";
import wasmUrl from "onnxruntime-web/ort-wasm-simd-threaded.asyncify.wasm?url";
import { gpuAlone } from "../../src/graphs/gpu_graphs";
import type { GraphSession, Value } from "../../src/graphs/graph_session";
import { onGpu, onProcessor, prepare } from "../../src/graphs/onnx_runtime";
import { selfTest } from "../../src/graphs/self_test";
import { seeded } from "../kernels/random";

/** What became of a graph: how far the GPU is from the processor, or why it does not do it. */
type Outcome = { readonly apart: number } | { readonly refused: string };

let prepared: Promise<void> | null = null;

async function load(): Promise<void> {
  prepare(onnx, await (await fetch(wasmUrl)).arrayBuffer(), 1);
}

/** The worst error of the self-test, relative to the largest element. */
export async function gpuSelfTest(): Promise<number> {
  await (prepared ??= load());
  return (await selfTest(gpuAlone(onProcessor(onnx), onGpu(onnx)))).error;
}

/**
 * Run a graph on the GPU alone, on random numbers.
 *
 * @param file the model, beside the page
 * @param types of its inputs, by name
 * @param samples of the batch
 */
export async function gpuGraph(
  file: string,
  types: { readonly [name: string]: Value["type"] },
  samples: number,
): Promise<Outcome> {
  await (prepared ??= load());
  const model = new Uint8Array(await (await fetch(file, { cache: "no-store" })).arrayBuffer());
  const processor = await onProcessor(onnx)(model);
  const given = new Map(
    processor.inputs.map(({ name, shape }, n) => [name, values(types[name]!, shape, samples, n)]),
  );
  const right = await processor.run(given, processor.outputs);
  const gpu: GraphSession = await gpuAlone(onProcessor(onnx), onGpu(onnx))(model);
  try {
    await gpu.run(given, gpu.outputs);
    const found = await gpu.run(given, gpu.outputs); // as after the first
    return { apart: Math.max(...[...right].map(([name, value]) => apart(value, found.get(name)))) };
  } catch (error) {
    return { refused: String(error) };
  }
}

function values(
  type: Value["type"],
  open: GraphSession["inputs"][number]["shape"],
  samples: number,
  seed: number,
): Value {
  const shape = open.map((size) => (typeof size === "string" ? samples : size));
  const random = seeded(seed + 1);
  const length = shape.reduce((product, size) => product * size, 1);
  if (type === "int64") return { type, shape, data: new BigInt64Array(length) };
  if (type === "bool") return { type, shape, data: new Uint8Array(length).fill(1) };
  if (type === "uint8")
    return { type, shape, data: Uint8Array.from({ length }, () => 256 * random()) };
  return { type, shape, data: Float32Array.from({ length }, () => random() - 0.5) };
}

function apart(right: Value, found: Value | undefined): number {
  let [off, largest] = [0, 1e-30];
  for (const [n, value] of Float64Array.from(right.data as Float32Array).entries()) {
    off = Math.max(off, Math.abs(value - Number(found?.data[n])));
    largest = Math.max(largest, Math.abs(value));
  }
  return off / largest;
}
