/** Graphs run by ONNX Runtime, on the processor in WebAssembly, or on the GPU. */

import type * as ort from "onnxruntime-web/wasm";
import { GraphError } from "./errors";
import type { GraphSession, OpenGraph, OpenSized, Sizes, Value } from "./graph_session";

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
 */
export function onGpu(onnx: Onnx): OpenSized {
  return (model, sizes) =>
    opened(
      onnx,
      model,
      { executionProviders: ["webgpu"], freeDimensionOverrides: sizes },
      { disable_cpu_ep_fallback: "1" },
    );
}

async function opened(
  onnx: Onnx,
  model: Uint8Array,
  options: { executionProviders: ["wasm" | "webgpu"]; freeDimensionOverrides?: Sizes },
  more: { readonly [name: string]: string } = {},
  optimization: { readonly [name: string]: string } = {},
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
    return new OnnxSession(onnx, session);
  } catch (error) {
    throw refused(error, "ONNX Runtime refuses the graph");
  }
}

class OnnxSession implements GraphSession {
  readonly inputs;
  readonly outputs: readonly string[];

  constructor(
    private readonly onnx: Onnx,
    private readonly session: ort.InferenceSession,
  ) {
    this.inputs = session.inputMetadata.map((input) => {
      if (!input.isTensor) throw new GraphError(`the input ${input.name} is no array`);
      return { name: input.name, shape: input.shape };
    });
    this.outputs = session.outputNames;
  }

  async run(
    given: ReadonlyMap<string, Value>,
    wanted: readonly string[],
  ): Promise<ReadonlyMap<string, Value>> {
    const feeds: { [name: string]: ort.Tensor } = {};
    for (const [name, value] of given) feeds[name] = tensorOf(this.onnx, value);
    let found: ort.InferenceSession.ReturnType;
    try {
      found = await this.session.run(feeds, wanted);
    } catch (error) {
      throw refused(error, "the graph cannot be run");
    }
    return new Map(wanted.map((name) => [name, valueOf(name, found[name])]));
  }

  async close(): Promise<void> {
    await this.session.release();
  }
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
