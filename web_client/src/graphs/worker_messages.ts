/** What a device and the worker that runs its graphs say to each other. */

import type { FetchOrder, GraphOrder, Sent } from "./orders";

/** The first that it is told: ONNX Runtime itself, and how many threads compute. */
export type Start = {
  readonly kind: "start";
  readonly wasm: ArrayBuffer;
  readonly threads: number;
};

/** To the worker. It does them one after another; `run` and `fetch` are answered. */
export type Order =
  | Start
  | { readonly kind: "keep"; readonly id: bigint; readonly sent: Sent }
  | { readonly kind: "join"; readonly id: bigint; readonly ids: readonly bigint[] }
  | { readonly kind: "forget"; readonly ids: readonly bigint[] }
  | { readonly kind: "run"; readonly order: GraphOrder; readonly room_bytes: number }
  | { readonly kind: "fetch"; readonly order: FetchOrder };

/** From the worker. */
export type Answer =
  | {
      readonly kind: "done";
      readonly seconds: number;
      /** Of a `fetch`; empty else. */
      readonly payload: Uint8Array<ArrayBuffer>;
    }
  | { readonly kind: "failed"; readonly reason: string }
  /** It is of no more use. */
  | { readonly kind: "lost"; readonly reason: string };
