/** A graph that is ready to be run, whatever runs it. */

import type { GpuArray, GpuMemory } from "./gpu_memory";

/** An array in the processor's memory; truth values are in bytes. */
export type Value =
  | { readonly type: "float32"; readonly shape: readonly number[]; readonly data: Float32Array }
  | { readonly type: "int64"; readonly shape: readonly number[]; readonly data: BigInt64Array }
  | { readonly type: "bool"; readonly shape: readonly number[]; readonly data: Uint8Array }
  | { readonly type: "uint8"; readonly shape: readonly number[]; readonly data: Uint8Array };

/** fp32 numbers that are kept between runs, in the processor's memory, in a GPU's, or in both. */
export interface Kept {
  readonly elements: number;
  /** Return all numbers in the processor's memory. */
  read(): Promise<Float32Array>;
  /** Return a copy of the numbers from index `from` to before `to` in the processor's memory. */
  part(from: number, to: number): Promise<Float32Array<ArrayBuffer>>;
  /** Return the numbers in a GPU's memory. Return null if the GPU has no memory for them. */
  onGpu(memory: GpuMemory): Promise<GpuArray | null>;
  /** Free the GPU's memory. */
  free(): void;
}

/** An array as graphs take and make it. */
export type Operand =
  Value | { readonly type: "float32"; readonly shape: readonly number[]; readonly kept: Kept };

/** Return an array in the processor's memory. */
export async function read(array: Operand): Promise<Value> {
  if (!("kept" in array)) return array;
  return { type: array.type, shape: array.shape, data: await array.kept.read() };
}

/** Free what an array occupies in a GPU's memory. */
export function free(array: Operand): void {
  if ("kept" in array) array.kept.free();
}

/** An input; a size that is not a number is the batch's, which may be any. */
export interface Input {
  readonly name: string;
  readonly shape: readonly (number | string)[];
}

/** One graph. */
export interface GraphSession {
  readonly inputs: readonly Input[];
  /** Names, in order. */
  readonly outputs: readonly string[];
  /**
   * Return the outputs that are wanted, by name. The caller frees them. The inputs stay as they are.
   *
   * @throws Error when it cannot be run
   */
  run(
    given: ReadonlyMap<string, Operand>,
    wanted: readonly string[],
  ): Promise<ReadonlyMap<string, Operand>>;
  /** Give back what it holds. */
  close(): Promise<void>;
}

/** Makes a graph ready; it throws where that cannot be done. */
export type OpenGraph = (model: Uint8Array) => Promise<GraphSession>;

/** Sizes that a graph leaves open, by their names. */
export type Sizes = { readonly [name: string]: number };

/** Makes a graph ready for arrays of these sizes alone. */
export type OpenSized = (model: Uint8Array, sizes: Sizes) => Promise<GraphSession>;
