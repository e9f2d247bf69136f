/** The worker that runs graphs on the GPU; see `graph.worker.ts`. */

import * as onnx from "onnxruntime-web/webgpu";
import { gpuAlone, gpuGraphs } from "./gpu_graphs";
import { serveGraphs } from "./graph_server";
import { onGpu, onProcessor, prepare } from "./onnx_runtime";

serveGraphs(({ wasm, threads }, lost) => {
  prepare(onnx, wasm, threads);
  const processor = onProcessor(onnx);
  // The arrays that the GPU keeps are gone with it.
  const gpu = onGpu(onnx, (device) => {
    device.lost.then(({ message }) => lost(`the GPU is gone: ${message}`), lost);
  });
  return [
    { open: gpuGraphs(processor, gpu), tested: gpuAlone(processor, gpu) },
    { open: processor, tested: processor },
  ];
});
