/** Which kernel this browser multiplies with: the fastest of those that are right. */

import { Crew, type Thread } from "./crew";
import { type Kernel, KernelName } from "./kernel";
import { OwnPool } from "./own_pool";
import { flopsPerSecond, trials, worstError } from "./reference";
import { SharedPool } from "./shared_pool";
import { WasmMemory } from "./wasm_memory";
import { WebGpuKernel } from "./webgpu";

/** What kernels need of the browser. */
export interface Surroundings {
  readonly gpu: GPU | undefined;
  /** Whether a GPU that is only emulated by the processor will do. */
  readonly softwareGpu: boolean;
  /** Whether memory can be shared between threads (the page is cross-origin isolated). */
  readonly isolated: boolean;
  /** How many threads multiply. */
  readonly threads: number;
  /** What matrices and results may take, in bytes. */
  readonly memory_bytes: number;
  readonly spawn: () => Thread;
  /** Fetches and compiles one of the two WASM modules. */
  readonly module: (shared: boolean) => Promise<WebAssembly.Module>;
  readonly random: () => number;
  readonly now_s: () => number;
}

/** A kernel that passed, and how fast it is. */
export interface Chosen {
  readonly kernel: Kernel;
  readonly flops_per_s: number;
}

/** Sides of the squares that kernels are timed with, and how long each is. */
const TIMED_SIDE = 256;
const TIMED_S = 0.15;

/** The memory of threads: operands and results, doubled for gaps between them, and scratch. */
const SPARE_BYTES = 32 * 2 ** 20;

/**
 * One kernel by its name.
 *
 * @throws Error where this browser does not have it
 */
export async function makeKernel(name: KernelName, around: Surroundings): Promise<Kernel> {
  if (name === KernelName.WEBGPU) {
    return WebGpuKernel.create(around.gpu, around.softwareGpu, around.now_s);
  }
  if (name === KernelName.JS) {
    const crew = new Crew(around.threads, around.spawn, around.now_s);
    return new OwnPool(name, threadsText(around.threads), crew, { kind: "js" });
  }
  const max_bytes = Math.min(2 * around.memory_bytes + SPARE_BYTES, 2 ** 32 - 65536);
  const memory = around.isolated ? sharedMemory(max_bytes) : null;
  const module = await around.module(memory !== null);
  const crew = new Crew(around.threads, around.spawn, around.now_s);
  if (memory) return new SharedPool(crew, module, memory);
  return new OwnPool(name, threadsText(around.threads), crew, { kind: "wasm", module, max_bytes });
}

/** A shared memory, or null where the system has no room for it, which it wants all at once. */
function sharedMemory(max_bytes: number): WasmMemory | null {
  try {
    return WasmMemory.create(max_bytes, true);
  } catch (error) {
    if (error instanceof RangeError) return null;
    throw error;
  }
}

/**
 * The fastest kernel that passes its self-check.
 *
 * @param names the candidates; plain JavaScript is only tried where no other passes
 * @param report told of each that is not used, and why
 * @throws Error where none passes
 */
export async function chooseKernel(
  names: readonly KernelName[],
  around: Surroundings,
  report: (name: KernelName, reason: string) => void,
): Promise<Chosen> {
  let best: Chosen | null = null;
  const last = names.filter((name) => name === KernelName.JS);
  for (const name of [...names.filter((name) => name !== KernelName.JS), ...last]) {
    if (name === KernelName.JS && best) break;
    const chosen = await tried(name, around, report);
    if (!chosen) continue;
    if (best && best.flops_per_s >= chosen.flops_per_s) {
      report(name, "another kernel is faster here");
      chosen.kernel.close();
      continue;
    }
    if (best) report(best.kernel.name, "another kernel is faster here");
    best?.kernel.close();
    best = chosen;
  }
  if (!best) throw new Error(`none of ${names.join(", ")} multiplies correctly in this browser`);
  return best;
}

async function tried(
  name: KernelName,
  around: Surroundings,
  report: (name: KernelName, reason: string) => void,
): Promise<Chosen | null> {
  let kernel: Kernel;
  try {
    kernel = await makeKernel(name, around);
  } catch (error) {
    report(name, String(error));
    return null;
  }
  const failed = kernel.lost.then((reason) => {
    throw new Error(reason);
  });
  try {
    const work = async () => {
      const share = await worstError(kernel, trials(around.random));
      if (share > 1) throw new Error("its results are wrong");
      const { random, now_s } = around;
      return flopsPerSecond(kernel, TIMED_SIDE, TIMED_S, random, now_s);
    };
    return { kernel, flops_per_s: await Promise.race([work(), failed]) };
  } catch (error) {
    report(name, String(error));
    kernel.close();
    return null;
  } finally {
    failed.catch(() => undefined); // of no interest any more
  }
}

function threadsText(threads: number): string {
  return threads === 1 ? "1 thread" : `${threads} threads`;
}
