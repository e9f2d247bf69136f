/** A graph that is ready to be run, whatever runs it. */

/** An array as graphs take it; truth values are in bytes. */
export type Value =
  | { readonly type: "float32"; readonly shape: readonly number[]; readonly data: Float32Array }
  | { readonly type: "int64"; readonly shape: readonly number[]; readonly data: BigInt64Array }
  | { readonly type: "bool"; readonly shape: readonly number[]; readonly data: Uint8Array }
  | { readonly type: "uint8"; readonly shape: readonly number[]; readonly data: Uint8Array };

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
   * The outputs that are wanted, for some inputs, by name.
   *
   * @throws Error when it cannot be run
   */
  run(
    given: ReadonlyMap<string, Value>,
    wanted: readonly string[],
  ): Promise<ReadonlyMap<string, Value>>;
  /** Give back what it holds. */
  close(): Promise<void>;
}

/** Makes a graph ready; it throws where that cannot be done. */
export type OpenGraph = (model: Uint8Array) => Promise<GraphSession>;

/** Sizes that a graph leaves open, by their names. */
export type Sizes = { readonly [name: string]: number };

/** Makes a graph ready for arrays of these sizes alone. */
export type OpenSized = (model: Uint8Array, sizes: Sizes) => Promise<GraphSession>;
