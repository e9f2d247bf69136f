/** What a device is asked to do with graphs, in the words of docs/protocol.md (*Graphs*). */

import type { DType } from "../kernels/kernel";

/** Elements that only graphs take, besides those of `DType`. */
export enum IndexType {
  INT64 = "int64",
  BOOL = "bool",
  UINT8 = "uint8",
}

/** What is kept for graphs, as it came. */
export type Sent =
  | { readonly kind: "graph"; readonly payload: Uint8Array }
  | { readonly kind: "array"; readonly dtype: DType; readonly payload: Uint8Array }
  | { readonly kind: "indices"; readonly type: IndexType; readonly payload: Uint8Array };

/** Run a graph. */
export interface GraphOrder {
  readonly run: bigint;
  readonly graph: bigint;
  /** In the graph's order; 0 for zeros. */
  readonly inputs: readonly bigint[];
  /** In the graph's order; 0 for one that is not kept. */
  readonly outputs: readonly bigint[];
  /** The size of each output that is kept. */
  readonly output_bytes: readonly number[];
}

/** Return rows of an array. */
export interface FetchOrder {
  readonly run: bigint;
  readonly array: bigint;
  readonly first_row: number;
  readonly rows: number;
  /** Its last dimension, whatever its shape is. */
  readonly columns: number;
  /** The dtype of the result. */
  readonly out: DType;
}
