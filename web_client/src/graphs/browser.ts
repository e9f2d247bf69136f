/** The browser's side of graphs: whether they can be run, and the worker that runs them. */

import gpuWasmUrl from "onnxruntime-web/ort-wasm-simd-threaded.asyncify.wasm?url";
import wasmUrl from "onnxruntime-web/ort-wasm-simd-threaded.wasm?url";
import gpuWorkerUrl from "./gpu_graph.worker.ts?worker&url";
import workerUrl from "./graph.worker.ts?worker&url";
import type { GraphWorker } from "./graph_thread";
import type { Order } from "./worker_messages";

/** What runs graphs: of each build of ONNX Runtime its worker and itself, 14 MB and 27 MB. */
const BUILDS = {
  processor: { worker: workerUrl, wasm: wasmUrl },
  gpu: { worker: gpuWorkerUrl, wasm: gpuWasmUrl },
} as const;

export type Build = keyof typeof BUILDS;

/** Less memory than this holds no layer that is worth the loading of ONNX Runtime. */
export const LEAST_BYTES = 64 * 2 ** 20;

/** A module with an instruction of SIMD, without which ONNX Runtime does not start. */
const SIMD = [
  ...[0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0],
  ...[10, 10, 1, 8, 0, 65, 0, 253, 15, 253, 98, 11],
];

/**
 * Whether this browser can run graphs.
 *
 * @param memory_bytes what the PS may fill
 */
export function runsGraphs(memory_bytes: number): boolean {
  if (memory_bytes < LEAST_BYTES || !WebAssembly.validate(Uint8Array.from(SIMD))) return false;
  try {
    // ONNX Runtime is built for shared memory, with one thread too, where no page may share it.
    new WebAssembly.Memory({ initial: 1, maximum: 1, shared: true });
    return true;
  } catch {
    return false;
  }
}

/**
 * Start the worker, with everything it needs. It is made of a blob: where a certificate was accepted
 * in spite of a warning, Chromium lets no worker that a worker starts load from the server.
 *
 * @throws Error where the server does not send it
 */
export async function startGraphWorker(build: Build, threads: number): Promise<GraphWorker> {
  const { worker: workerUrl, wasm: wasmUrl } = BUILDS[build];
  const [script, runtime] = await Promise.all([fetched(workerUrl), fetched(wasmUrl)]);
  const blob = new Blob([await script.arrayBuffer()], { type: "text/javascript" });
  // The address stays: ONNX Runtime starts its threads from it.
  const worker = new Worker(URL.createObjectURL(blob), { type: "module" });
  const wasm = await runtime.arrayBuffer();
  const isolated = globalThis.crossOriginIsolated === true;
  const start: Order = { kind: "start", wasm, threads: isolated ? threads : 1 };
  worker.postMessage(start, [wasm]);
  return worker;
}

async function fetched(url: string): Promise<Response> {
  const response = await fetch(url);
  if (!response.ok) throw new Error(`ONNX Runtime cannot be loaded (${response.status})`);
  return response;
}
