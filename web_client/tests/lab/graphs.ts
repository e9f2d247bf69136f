/** Graphs on a GPU alone, beside the processor. */

import * as onnx from "onnxruntime-web/webgpu";
import wasmUrl from "onnxruntime-web/ort-wasm-simd-threaded.asyncify.wasm?url";
import { gpuAlone } from "../../src/graphs/gpu_graphs";
import { GpuArray, GpuMemory } from "../../src/graphs/gpu_memory";
import { GraphMemory } from "../../src/graphs/graph_memory";
import {
  type GraphSession,
  type OpenGraph,
  type Operand,
  read,
  type Value,
} from "../../src/graphs/graph_session";
import { GraphStore } from "../../src/graphs/graph_store";
import { onGpu, onProcessor, prepare } from "../../src/graphs/onnx_runtime";
import { IndexType } from "../../src/graphs/orders";
import { selfTest } from "../../src/graphs/self_test";
import { DType } from "../../src/kernels/kernel";
import { narrow } from "../../src/kernels/numbers";
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
  const model = await fetched(file);
  const processor = await onProcessor(onnx)(model);
  const given = new Map(
    processor.inputs.map(({ name, shape }, n) => [name, values(types[name]!, shape, samples, n)]),
  );
  const right = await processor.run(given, processor.outputs);
  const gpu: GraphSession = await gpuAlone(onProcessor(onnx), onGpu(onnx))(model);
  try {
    await gpu.run(given, gpu.outputs);
    const found = await gpu.run(given, gpu.outputs); // as after the first
    let worst = 0;
    for (const [name, value] of right) worst = Math.max(worst, await apart(value, found.get(name)));
    return { apart: worst };
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

async function fetched(file: string): Promise<Uint8Array> {
  return new Uint8Array(await (await fetch(file, { cache: "no-store" })).arrayBuffer());
}

async function apart(right: Operand, found: Operand | undefined): Promise<number> {
  if (!found) return Infinity;
  const [wanted, data] = [(await read(right)).data, (await read(found)).data];
  return apartOf(wanted as Float32Array, data as Float32Array);
}

/** How far numbers are apart, relative to the largest one. */
function apartOf(right: Float32Array, found: Float32Array): number {
  if (right.length !== found.length) return Infinity;
  let [off, largest] = [0, 1e-30];
  for (const [n, value] of right.entries()) {
    const apart = Math.abs(value - found[n]!);
    off = Number.isNaN(apart) ? Infinity : Math.max(off, apart);
    largest = Math.max(largest, Math.abs(value));
  }
  return off / largest;
}

/** What two micro-batches of a layer on the GPU came to. */
interface Trained {
  /** How far the layer's outputs and sums are from the processor's, by name. */
  readonly apart: { readonly [name: string]: number };
  /** Bytes of the layer's parameters in fp32. */
  readonly parameter_bytes: number;
  /** Bytes that went to the GPU in each micro-batch. */
  readonly uploaded_bytes: readonly number[];
  /** Bytes that came back in each micro-batch, before the results were fetched. */
  readonly downloaded_bytes: readonly number[];
  /** Arrays on the GPU before and after everything was dropped. */
  readonly kept: readonly [before: number, after: number];
}

/** What went to the GPU and came back, and how many arrays are kept there. */
const traffic = { up_bytes: 0, down_bytes: 0, kept: 0, watched: false };

function watchTraffic(): void {
  if (traffic.watched) return;
  traffic.watched = true;
  const [{ createBuffer }, { writeBuffer }] = [GPUDevice.prototype, GPUQueue.prototype];
  GPUDevice.prototype.createBuffer = function (this: GPUDevice, description) {
    if (description.mappedAtCreation) traffic.up_bytes += description.size;
    if (description.usage & GPUBufferUsage.MAP_READ) traffic.down_bytes += description.size;
    return createBuffer.call(this, description);
  };
  GPUQueue.prototype.writeBuffer = function (this: GPUQueue, buffer, at, data, from, size) {
    traffic.up_bytes += size ?? data.byteLength;
    return writeBuffer.call(this, buffer, at, data as ArrayBuffer, from, size);
  };
  const [{ make }, { free }] = [GpuMemory.prototype, GpuArray.prototype];
  GpuMemory.prototype.make = async function (this: GpuMemory, ...all) {
    const made = await make.apply(this, all);
    if (made) traffic.kept++;
    return made;
  };
  GpuArray.prototype.free = function (this: GpuArray) {
    traffic.kept--;
    free.call(this);
  };
}

/**
 * Train a layer on two micro-batches of random numbers, on the GPU alone and on the processor.
 *
 * @param files the models of its forward and backward pass, beside the page; the latter takes the
 *   activations
 * @param types of their inputs, by name
 * @param samples of a micro-batch
 */
export async function gpuTraining(
  files: readonly [forward: string, backward: string],
  types: { readonly [name: string]: Value["type"] },
  samples: number,
): Promise<Trained> {
  await (prepared ??= load());
  watchTraffic();
  const models = [await fetched(files[0]), await fetched(files[1])] as const;
  const processor = onProcessor(onnx);
  const right = await trained(processor, models, types, samples);
  const found = await trained(gpuAlone(processor, onGpu(onnx)), models, types, samples);
  const apart = [...right.results].map(([name, numbers]) => {
    return [name, apartOf(numbers, found.results.get(name)!)] as const;
  });
  return { ...found, apart: Object.fromEntries(apart) };
}

async function trained(
  open: OpenGraph,
  models: readonly [Uint8Array, Uint8Array],
  types: { readonly [name: string]: Value["type"] },
  samples: number,
) {
  const graphs = [1n, 2n] as const;
  const store = new GraphStore(
    open,
    () => performance.now() / 1000,
    (model) => new GraphMemory(model),
  );
  for (const [n, id] of graphs.entries()) store.keep(id, { kind: "graph", payload: models[n]! });
  const sessions = [
    await onProcessor(onnx)(models[0]),
    await onProcessor(onnx)(models[1]),
  ] as const;
  const inputs = new Map(sessions.flatMap((session) => session.inputs.map((of) => [of.name, of])));
  const ids = new Map([...inputs.keys()].map((name, n) => [name, BigInt(n + 3)]));
  ids.set("y", 1001n).set("dx", 1002n);
  const random = (name: string, seed: number) =>
    values(types[name]!, inputs.get(name)!.shape, samples, seed);
  const put = (name: string, seed: number) => {
    const value = random(name, seed);
    const payload = new Uint8Array(value.data.slice().buffer);
    const id = ids.get(name)!;
    if (value.type !== "float32") {
      store.keep(id, { kind: "indices", type: IndexType[upper(value.type)], payload });
    } else if (name.startsWith("parameter:")) {
      store.keep(id, {
        kind: "array",
        dtype: DType.BF16,
        payload: narrow(value.data.slice(), DType.BF16),
      });
    } else store.keep(id, { kind: "array", dtype: DType.FP32, payload });
  };
  const sum = (output: string) => output.replace(/^new:/, "sum:");
  const bytesOf = (name: string) => {
    const of = name === "y" || name === "dx" ? "x" : sum(name);
    return random(of, 0).data.byteLength;
  };
  const run = async (n: 0 | 1, first: boolean) => {
    const { inputs, outputs } = sessions[n];
    const order = {
      run: 1n,
      graph: graphs[n],
      inputs: inputs.map(({ name }) => (first && name.startsWith("sum:") ? 0n : ids.get(name)!)),
      outputs: outputs.map((name) => ids.get(sum(name)) ?? 0n),
      output_bytes: outputs.filter((name) => ids.has(sum(name))).map(bytesOf),
    };
    await store.run(order, Infinity);
  };
  const parameters = [...inputs.keys()].filter((name) => name.startsWith("parameter:"));
  const given = [...inputs.keys()].filter((name) => !/^(sum|activation|parameter):/.test(name));
  for (const [n, name] of parameters.entries()) put(name, n);
  const [uploaded_bytes, downloaded_bytes]: [number[], number[]] = [[], []];
  const made = ["y", "dx", ...[...inputs.keys()].filter((name) => name.startsWith("activation:"))];
  for (const seed of [50, 60]) {
    const [up, down] = [traffic.up_bytes, traffic.down_bytes];
    for (const [n, name] of given.entries()) put(name, seed + n);
    await run(0, seed === 50);
    await run(1, seed === 50);
    uploaded_bytes.push(traffic.up_bytes - up);
    downloaded_bytes.push(traffic.down_bytes - down);
    if (seed === 50) await store.forget([...made, ...given].map((name) => ids.get(name)!));
  }
  await store.forget(graphs); // arrays outlive the graphs that made them
  const results = new Map<string, Float32Array>();
  for (const name of [...ids.keys()].filter((name) => /^(y|dx|sum:.*)$/.test(name))) {
    const rows = bytesOf(name) / 4;
    const order = { run: 1n, array: ids.get(name)!, first_row: 0, rows, columns: 1 };
    const payload = await store.fetch({ ...order, out: DType.FP32 });
    results.set(name, new Float32Array(payload.buffer));
  }
  const before = traffic.kept;
  await store.forget([...ids.values()]);
  for (const session of sessions) await session.close();
  const parameter_bytes = parameters.reduce((all, name) => all + bytesOf(name), 0);
  const kept = [before, traffic.kept] as const;
  return { results, parameter_bytes, uploaded_bytes, downloaded_bytes, kept };
}

const upper = (type: "int64" | "bool" | "uint8") =>
  type.toUpperCase() as "INT64" | "BOOL" | "UINT8";
