/** Kernels in a real browser, for tests and benchmarks: `npm run lab` builds this page. */

import { surroundings } from "../../src/kernels/browser";
import { makeKernel } from "../../src/kernels/choose";
import { DType, type KernelName } from "../../src/kernels/kernel";
import {
  errorShare,
  flopsPerSecond,
  once,
  randomProduct,
  relativeError,
  trials,
  worstError,
} from "../../src/kernels/reference";
import { seeded } from "../kernels/random";

interface Errors {
  /** Worst error as a share of what rounding allows, over the self-check and the odd sizes. */
  readonly share: number;
  /** Worst fp32 error by size, relative to the sum of magnitudes. */
  readonly fp32: { readonly [size: string]: number };
}

const ODD: readonly (readonly [number, number, number])[] = [
  [1, 1, 1],
  [3, 3, 3],
  [127, 127, 127],
  [250, 333, 250],
];

const MEMORY_BYTES = 128 * 2 ** 20;

const lab = {
  isolated: globalThis.crossOriginIsolated,

  /** A kernel's errors against double precision. */
  async errors(name: KernelName, threads: number): Promise<Errors> {
    const kernel = await makeKernel(name, surroundings(MEMORY_BYTES, threads, true));
    try {
      const random = seeded(1);
      let share = await worstError(kernel, trials(random));
      const fp32: { [size: string]: number } = {};
      for (const [rows, columns, depth] of ODD) {
        for (const dtype of Object.values(DType)) {
          for (const transposeB of [false, true]) {
            const turn = { transposeA: !transposeB && rows > 1, transposeB };
            const product = randomProduct(rows, columns, [depth], dtype, random, turn);
            const payload = await once(kernel, product);
            share = Math.max(share, errorShare(product, payload));
            if (dtype !== DType.FP32) continue;
            const size = `${rows}x${columns}`;
            fp32[size] = Math.max(fp32[size] ?? 0, relativeError(product, payload));
          }
        }
      }
      return { share, fp32 };
    } finally {
      kernel.close();
    }
  },

  /** Many products at once, some forgotten and some cancelled while they wait; worst share. */
  async crowd(name: KernelName, threads: number, products: number): Promise<number> {
    const kernel = await makeKernel(name, surroundings(MEMORY_BYTES, threads, true));
    try {
      const random = seeded(2);
      const shares = Array.from({ length: products }, async (_, i) => {
        const side = 1 + Math.floor(random() * 200);
        const product = randomProduct(side, 61, [side, 40], DType.FP32, random);
        const pairs = product.pairs.map(([a, b]) => [{ ...a }, { ...b }] as const);
        for (const matrix of pairs.flat()) kernel.hold(matrix);
        const wanted = i % 5 !== 4;
        const outcome = kernel.multiply({ ...product, pairs }, () => wanted);
        for (const matrix of pairs.flat()) kernel.forget(matrix);
        const done = await outcome;
        if (!done) return wanted ? Number.POSITIVE_INFINITY : 0;
        return errorShare(product, done.payload);
      });
      return Math.max(...(await Promise.all(shares)));
    } finally {
      kernel.close();
    }
  },

  /** A kernel's speed on squares, FLOP/s. */
  async flops_per_s(name: KernelName, threads: number, side: number, time_s: number) {
    const around = surroundings(MEMORY_BYTES, threads, true);
    const kernel = await makeKernel(name, around);
    try {
      await flopsPerSecond(kernel, side, 0.1, seeded(3), around.now_s);
      return await flopsPerSecond(kernel, side, time_s, seeded(3), around.now_s);
    } finally {
      kernel.close();
    }
  },

  /** The GPU that WebGPU gives this page, or why there is none. */
  async gpu(): Promise<string> {
    const adapter = await navigator.gpu?.requestAdapter();
    if (!adapter) return "";
    return `${adapter.info.vendor} ${adapter.info.architecture} f16=${adapter.features.has("shader-f16")}`;
  },
};

Object.assign(globalThis, { lab });
