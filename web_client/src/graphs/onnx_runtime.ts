/** Graphs run by ONNX Runtime, on the processor in WebAssembly, or on the GPU. */

import type * as ort from "onnxruntime-web/wasm";
import { GraphError } from "./errors";
import { type GpuArray, GpuMemory } from "./gpu_memory";
import {
  type GraphSession,
  type OpenGraph,
  type OpenSized,
  type Operand,
  read,
  type Sizes,
  type Value,
} from "./graph_session";
import { written } from "./graph_writer";

/** One of ONNX Runtime's builds for browsers, which have the same functions. */
export type Onnx = Pick<typeof ort, "env" | "InferenceSession" | "Tensor">;

/**
 * Tell a build how it is to start.
 *
 * @param wasm ONNX Runtime itself
 * @param threads how many compute; more than one needs shared memory
 */
export function prepare({ env }: Onnx, wasm: ArrayBuffer, threads: number): void {
  env.logLevel = "fatal"; // what fails is thrown
  env.wasm.wasmBinary = wasm;
  // Nothing is loaded from there, and no address is made of this script's own, which may be a blob.
  env.wasm.wasmPaths = { wasm: "ort.wasm" };
  env.wasm.numThreads = threads;
}

/** What makes graphs ready on the processor, with a build that was prepared. */
export function onProcessor(onnx: Onnx): OpenGraph {
  return (model) =>
    opened(
      onnx,
      model,
      { executionProviders: ["wasm"] },
      {},
      // What follows from constants would be made at once and held to the end, however large it is;
      // of equal arrays one would be held from its first use to its last.
      { disable_specified_optimizers: "ConstantFolding;CommonSubexpressionElimination" },
    );
}

/**
 * What makes graphs ready on the GPU. Where an operation would be done by the processor, and arrays
 * go to and fro for it, that is refused; with its sizes known a graph computes none of them there.
 * Numbers that are kept stay in the GPU's memory from run to run.
 *
 * @param started is told the GPU's device before its first graph
 */
export function onGpu(onnx: Onnx, started: (device: GPUDevice) => void = () => {}): OpenSized {
  let memory: Promise<GpuMemory> | null = null;
  return async (model, sizes) => {
    memory ??= startGpu(onnx, started);
    return openedOnGpu(onnx, model, sizes, await memory);
  };
}

/** Open a graph that is never closed: ONNX Runtime destroys the device with its last graph there. */
async function startGpu(onnx: Onnx, started: (device: GPUDevice) => void): Promise<GpuMemory> {
  const one = [1];
  const node = { operation: "Identity", inputs: ["x"], outputs: ["y"] };
  await openedOnGpu(onnx, written([node], { x: one }, { y: one }), {}, null);
  const device = (await onnx.env.webgpu.device) as GPUDevice;
  started(device);
  return new GpuMemory(device);
}

function openedOnGpu(
  onnx: Onnx,
  model: Uint8Array,
  sizes: Sizes,
  memory: GpuMemory | null,
): Promise<GraphSession> {
  return opened(
    onnx,
    model,
    { executionProviders: ["webgpu"], freeDimensionOverrides: sizes },
    { disable_cpu_ep_fallback: "1" },
    {},
    memory,
  );
}

async function opened(
  onnx: Onnx,
  model: Uint8Array,
  options: { executionProviders: ["wasm" | "webgpu"]; freeDimensionOverrides?: Sizes },
  more: { readonly [name: string]: string } = {},
  optimization: { readonly [name: string]: string } = {},
  memory: GpuMemory | null = null,
): Promise<GraphSession> {
  try {
    const session = await onnx.InferenceSession.create(model, {
      ...options,
      logSeverityLevel: 4,
      // As in Python: a plan of memory is held beside what the first run took, and saves no time.
      enableMemPattern: false,
      // What looks like ONNX Runtime's own format was not checked as that, and may be anything.
      extra: { session: { load_model_format: "ONNX", ...more }, optimization },
    });
    return new OnnxSession(onnx, session, memory, options.freeDimensionOverrides ?? {});
  } catch (error) {
    throw refused(error, "ONNX Runtime refuses the graph");
  }
}

class OnnxSession implements GraphSession {
  readonly inputs;
  readonly outputs: readonly string[];

  /**
   * @param memory where inputs and outputs of fp32 are; null for the processor's memory
   * @param sizes sizes of the graph that are open in the model, by name
   */
  constructor(
    private readonly onnx: Onnx,
    private readonly session: ort.InferenceSession,
    private readonly memory: GpuMemory | null,
    private readonly sizes: Sizes,
  ) {
    this.inputs = session.inputMetadata.map((input) => {
      if (!input.isTensor) throw new GraphError(`the input ${input.name} is no array`);
      return { name: input.name, shape: input.shape };
    });
    this.outputs = session.outputNames;
  }

  async run(
    given: ReadonlyMap<string, Operand>,
    wanted: readonly string[],
  ): Promise<ReadonlyMap<string, Operand>> {
    const feeds: { [name: string]: ort.Tensor } = {};
    // One after another: an array that is given twice is uploaded once.
    for (const [name, array] of given) feeds[name] = await this.#tensor(array);
    const made = await this.#made(wanted);
    const fetches = wanted.map((name) => {
      const place = made.get(name);
      return [name, place ? gpuTensor(this.onnx, place.kept, place.shape) : null];
    });
    try {
      const found = await this.session.run(feeds, Object.fromEntries(fetches));
      await this.memory?.finished(); // ONNX Runtime returns before the GPU has computed
      return new Map(wanted.map((name) => [name, made.get(name) ?? valueOf(name, found[name])]));
    } catch (error) {
      for (const { kept } of made.values()) kept.free();
      throw refused(error, "the graph cannot be run");
    }
  }

  async close(): Promise<void> {
    await this.session.release();
  }

  async #tensor(array: Operand): Promise<ort.Tensor> {
    const kept = this.memory && "kept" in array && (await array.kept.onGpu(this.memory));
    if (kept) return gpuTensor(this.onnx, kept, array.shape);
    return tensorOf(this.onnx, await read(array));
  }

  /** Make the outputs in the GPU's memory that fit there. ONNX Runtime downloads the others. */
  async #made(wanted: readonly string[]): Promise<ReadonlyMap<string, Made>> {
    const { memory } = this;
    const made = new Map<string, Made>();
    if (!memory) return made;
    await Promise.all(
      this.session.outputMetadata.map(async (output) => {
        if (!wanted.includes(output.name) || !output.isTensor || output.type !== "float32") return;
        const shape = output.shape.map((size) =>
          Number(typeof size === "string" ? this.sizes[size] : size),
        );
        if (!shape.every((size) => size >= 0)) return; // a size that is not known is NaN or -1
        const kept = await memory.make(shape.reduce((all, size) => all * size, 1));
        if (kept) made.set(output.name, { type: "float32", shape, kept });
      }),
    );
    return made;
  }
}

/** An output that the GPU writes into its own memory. */
interface Made {
  readonly type: "float32";
  readonly shape: readonly number[];
  readonly kept: GpuArray;
}

function gpuTensor({ Tensor }: Onnx, { buffer }: GpuArray, dims: readonly number[]): ort.Tensor {
  return Tensor.fromGpuBuffer(buffer, { dataType: "float32", dims });
}

function tensorOf({ Tensor }: Onnx, { type, data, shape }: Value): ort.Tensor {
  if (type === "float32") return new Tensor(type, data, shape);
  return type === "int64" ? new Tensor(type, data, shape) : new Tensor(type, data, shape);
}

function valueOf(name: string, tensor: ort.Tensor | undefined): Value {
  const { type, data, dims: shape } = tensor ?? { type: "nothing", data: null, dims: [] };
  if (type === "float32" && data instanceof Float32Array) return { type, shape, data };
  if (type === "int64" && data instanceof BigInt64Array) return { type, shape, data };
  if (type === "bool" && data instanceof Uint8Array) return { type, shape, data };
  if (type === "uint8" && data instanceof Uint8Array) return { type, shape, data };
  throw new GraphError(`the output ${name} is ${type}, which graphs do not have`);
}

/** What ONNX Runtime says, in a line; what has broken it passes through. */
function refused(error: unknown, what: string): Error {
  if (error instanceof WebAssembly.RuntimeError || error instanceof GraphError) return error;
  const [line = ""] = String(error instanceof Error ? error.message : error).split("\n");
  return new GraphError(`${what}: ${line.slice(0, 300)}`);
}
