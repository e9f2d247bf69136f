/**
 * The worker that runs graphs on the processor: a run of a large layer takes longer than a server
 * waits for a sign of life, so the connection is not here.
 */

import * as onnx from "onnxruntime-web/wasm";
import { serveGraphs } from "./graph_server";
import { onProcessor, prepare } from "./onnx_runtime";

serveGraphs(({ wasm, threads }) => {
  prepare(onnx, wasm, threads);
  const open = onProcessor(onnx);
  return [{ open, tested: open }];
});
