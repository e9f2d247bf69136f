/** The browser's side of `Surroundings`, in a page or a worker. */

import type { Surroundings } from "./choose";
import type { Thread } from "./crew";
import KernelThread from "./kernel.worker.ts?worker&inline";
import ownUrl from "./matmul.own.wasm?url";
import sharedUrl from "./matmul.shared.wasm?url";

/** What this browser offers to kernels. */
export function surroundings(
  memory_bytes: number,
  threads: number,
  softwareGpu: boolean,
): Surroundings {
  return {
    gpu: navigator.gpu,
    softwareGpu,
    isolated: globalThis.crossOriginIsolated === true,
    threads,
    memory_bytes,
    // Out of the bundle: where a certificate was accepted in spite of a warning, Chromium lets a
    // page's own workers load from the server, and none that a worker starts.
    spawn: () => new KernelThread() as unknown as Thread,
    module: async (shared) => {
      const response = await fetch(shared ? sharedUrl : ownUrl);
      if (!response.ok) throw new Error(`the WASM kernel cannot be loaded (${response.status})`);
      return WebAssembly.compile(await response.arrayBuffer());
    },
    random: Math.random,
    now_s: () => performance.now() / 1000,
  };
}
