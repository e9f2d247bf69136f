/** What a pool and its workers say to each other. */

import type { Product, Shape } from "./kernel";
import type { Placed, Rows } from "./wasm";

/** A matrix by the number that its pool gave it. */
export interface Named extends Shape {
  readonly key: number;
}

/** To a worker. */
export type Order =
  /** Plain JavaScript, matrices in the worker. */
  | { readonly kind: "js" }
  /** WASM, matrices in a memory of the worker's own. */
  | { readonly kind: "wasm"; readonly module: WebAssembly.Module; readonly max_bytes: number }
  /** WASM over a memory that all workers share. */
  | {
      readonly kind: "shared";
      readonly module: WebAssembly.Module;
      readonly memory: WebAssembly.Memory;
      readonly scratch: number;
    }
  | { readonly kind: "hold"; readonly matrix: Named; readonly payload: Uint8Array }
  | { readonly kind: "forget"; readonly key: number }
  | { readonly kind: "multiply"; readonly job: number; readonly product: Product<Named> }
  | {
      readonly kind: "rows";
      readonly job: number;
      readonly product: Product<Placed>;
      readonly rows: Rows;
      readonly out: number;
    };

/** From a worker, for each `multiply` and `rows`; the payload only for `multiply`. */
export type Answer =
  | {
      readonly job: number;
      readonly payload: Uint8Array | null;
      readonly reason: null;
    }
  | { readonly job: number; readonly reason: string };
