/** Kernels in a real browser, for tests and benchmarks: `npm run lab` builds this page. */

import { decode, encode } from "../../src/coding/exponents";
import { surroundings } from "../../src/kernels/browser";
import { makeKernel } from "../../src/kernels/choose";
import { DType, type Kernel, type KernelName, type Matrix } from "../../src/kernels/kernel";
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
import { gpuGraph, gpuSelfTest, gpuTraining } from "./graphs";

interface Errors {
  /** Worst error as a share of what rounding allows, over the self-check and the odd sizes. */
  readonly share: number;
  /** Worst fp32 error by size, relative to the sum of magnitudes. */
  readonly fp32: { readonly [size: string]: number };
}

/** An operand of `lab.multiply`: a file beside the page, row by row, and its shape there. */
interface Stored {
  readonly file: string;
  readonly rows: number;
  readonly columns: number;
  readonly dtype: DType;
  readonly transposed: boolean;
}

const ODD: readonly (readonly [number, number, number])[] = [
  [1, 1, 1],
  [3, 3, 3],
  [127, 127, 127],
  [250, 333, 250],
];

const MEMORY_BYTES = 128 * 2 ** 20;

/** Those of `lab.multiply`, which go on from one product to the next. */
const kernels = new Map<KernelName, Promise<Kernel>>();

async function fetched({ file, rows, columns, dtype }: Stored): Promise<Matrix> {
  const response = await fetch(file, { cache: "no-store" });
  if (!response.ok) throw new Error(`${file} cannot be loaded (${response.status})`);
  return { rows, columns, dtype, payload: new Uint8Array(await response.arrayBuffer()) };
}

function base64(bytes: Uint8Array): string {
  const part = 0x8000; // what a call takes as arguments
  let text = "";
  for (let i = 0; i < bytes.length; i += part) {
    text += String.fromCharCode(...bytes.subarray(i, i + part));
  }
  return btoa(text);
}

const lab = {
  gpuGraph,
  gpuSelfTest,
  gpuTraining,
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

  /** One product of two operands that somebody else chose; the result's elements, in base64. */
  async multiply(name: KernelName, threads: number, a: Stored, b: Stored, out: DType) {
    const made = kernels.get(name) ?? makeKernel(name, surroundings(MEMORY_BYTES, threads, true));
    kernels.set(name, made);
    const kernel = await made;
    const failed = kernel.lost.then((reason) => {
      throw new Error(reason);
    });
    const product = {
      pairs: [[await fetched(a), await fetched(b)]] as const,
      transposeA: a.transposed,
      transposeB: b.transposed,
      rows: a.transposed ? a.columns : a.rows,
      columns: b.transposed ? b.rows : b.columns,
      out,
    };
    return base64(await Promise.race([once(kernel, product), failed]));
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

  /** Codes the elements in a file and decodes them again; best times, and the coded form. */
  async coding(file: string, dtype: DType, tries: number) {
    const payload = new Uint8Array(await (await fetch(file, { cache: "no-store" })).arrayBuffer());
    let [encode_s, decode_s] = [Number.POSITIVE_INFINITY, Number.POSITIVE_INFINITY];
    let coded = new Uint8Array();
    for (; tries > 0; tries--) {
      const began = performance.now();
      coded = encode(payload, dtype);
      const middle = performance.now();
      const back = decode(coded, dtype, payload.length);
      const ended = performance.now();
      if (back.some((byte, at) => byte !== payload[at])) throw new Error("coding is not exact");
      encode_s = Math.min(encode_s, (middle - began) / 1000);
      decode_s = Math.min(decode_s, (ended - middle) / 1000);
    }
    return { encode_s, decode_s, coded: base64(coded) };
  },

  /** The GPU that WebGPU gives this page, or why there is none. */
  async gpu(): Promise<string> {
    const adapter = await navigator.gpu?.requestAdapter();
    if (!adapter) return "";
    return `${adapter.info.vendor} ${adapter.info.architecture} f16=${adapter.features.has("shader-f16")}`;
  },
};

Object.assign(globalThis, { lab });
