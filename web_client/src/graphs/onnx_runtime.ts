/** Graphs run by ONNX Runtime in WebAssembly. */

import * as ort from "onnxruntime-web/wasm";
import { GraphError } from "./errors";
import type { GraphSession, OpenGraph, Value } from "./graph_session";

/**
 * What makes graphs ready.
 *
 * @param wasm ONNX Runtime itself
 * @param threads how many compute; more than one needs shared memory
 */
export function onnxRuntime(wasm: ArrayBuffer, threads: number): OpenGraph {
  ort.env.logLevel = "fatal"; // what fails is thrown
  ort.env.wasm.wasmBinary = wasm;
  // Nothing is loaded from there, and no address is made of this script's own, which may be a blob.
  ort.env.wasm.wasmPaths = { wasm: "ort.wasm" };
  ort.env.wasm.numThreads = threads;
  return async (model) => {
    let session: ort.InferenceSession;
    try {
      session = await ort.InferenceSession.create(model, {
        executionProviders: ["wasm"],
        logSeverityLevel: 4,
        // As in Python: a plan of memory is held beside what the first run took, and saves no time.
        enableMemPattern: false,
        // What looks like ONNX Runtime's own format was not checked as that, and may be anything.
        extra: { session: { load_model_format: "ONNX" } },
      });
    } catch (error) {
      throw refused(error, "ONNX Runtime refuses the graph");
    }
    return new OnnxSession(session);
  };
}

class OnnxSession implements GraphSession {
  readonly inputs;
  readonly outputs: readonly string[];

  constructor(private readonly session: ort.InferenceSession) {
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
    for (const [name, value] of given) feeds[name] = tensorOf(value);
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

function tensorOf({ type, data, shape }: Value): ort.Tensor {
  if (type === "float32") return new ort.Tensor(type, data, shape);
  return type === "int64" ? new ort.Tensor(type, data, shape) : new ort.Tensor(type, data, shape);
}

function valueOf(name: string, tensor: ort.Tensor | undefined): Value {
  const { type, data, dims: shape } = tensor ?? { type: "nothing", data: null, dims: [] };
  if (type === "float32" && data instanceof Float32Array) return { type, shape, data };
  if (type === "int64" && data instanceof BigInt64Array) return { type, shape, data };
  if (type === "bool" && data instanceof Uint8Array) return { type, shape, data };
  throw new GraphError(`the output ${name} is ${type}, which graphs do not have`);
}

/** What ONNX Runtime says, in a line; what has broken it passes through. */
function refused(error: unknown, what: string): Error {
  if (error instanceof WebAssembly.RuntimeError) return error;
  const [line = ""] = String(error instanceof Error ? error.message : error).split("\n");
  return new GraphError(`${what}: ${line.slice(0, 300)}`);
}
