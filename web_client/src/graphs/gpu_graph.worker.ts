/** The worker that runs graphs on the GPU; see `graph.worker.ts`. */

import * as onnx from "onnxruntime-web/webgpu";
import { gpuAlone, gpuGraphs } from "./gpu_graphs";
import type { OpenSized } from "./graph_session";
import { type Lost, serveGraphs } from "./graph_server";
import { onGpu, onProcessor, prepare } from "./onnx_runtime";

/** Tells when a GPU is gone that ONNX Runtime works with; it lets go of one after its last graph. */
function watched(open: OpenSized, lost: Lost): OpenSized {
  let latest: GPUDevice | null = null;
  return async (model, sizes) => {
    const session = await open(model, sizes);
    const device = (await onnx.env.webgpu.device) as GPUDevice;
    if (device !== latest) {
      latest = device;
      device.lost.then(({ reason, message }) => {
        if (reason !== "destroyed") lost(`the GPU is gone: ${message}`);
      }, lost);
    }
    return session;
  };
}

serveGraphs(({ wasm, threads }, lost) => {
  prepare(onnx, wasm, threads);
  const processor = onProcessor(onnx);
  const gpu = watched(onGpu(onnx), lost);
  return [
    { open: gpuGraphs(processor, gpu), tested: gpuAlone(processor, gpu) },
    { open: processor, tested: processor },
  ];
});
