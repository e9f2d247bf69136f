/** The browser's side of `Surroundings`, in a page or a worker. */

import type { Surroundings } from "./choose";
import type { Thread } from "./crew";
import ownUrl from "./matmul.own.wasm?url";
import sharedUrl from "./matmul.shared.wasm?url";

/** More threads than this gain little, and make a phone hot. */
const MOST_THREADS = 8;

/** Threads that multiply here: one core is left to everything else. */
export function threadsOf(cores: number): number {
  return Math.max(1, Math.min(MOST_THREADS, cores - 1));
}

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
    spawn: () =>
      new Worker(new URL("./kernel.worker.ts", import.meta.url), {
        type: "module",
      }) as unknown as Thread,
    module: async (shared) => {
      const response = await fetch(shared ? sharedUrl : ownUrl);
      if (!response.ok) throw new Error(`the WASM kernel cannot be loaded (${response.status})`);
      return WebAssembly.compile(await response.arrayBuffer());
    },
    random: Math.random,
    now_s: () => performance.now() / 1000,
  };
}
