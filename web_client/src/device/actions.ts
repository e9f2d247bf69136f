/** What a device core wants done. */

import type { FetchOrder, GraphOrder, Sent } from "../graphs/orders";
import type { Matrix, Product } from "../kernels/kernel";
import { cleanText } from "../protocol/codec";
import type { Message } from "../protocol/messages";

/** What the shell is to do. */
export type Action =
  | { readonly kind: "send"; readonly message: Message }
  /** Keep a matrix for products to come. */
  | { readonly kind: "hold"; readonly matrix: Matrix }
  /** No product that is asked for from now on names the matrix. */
  | { readonly kind: "forget"; readonly matrix: Matrix }
  /** Compute, then call `computed` or `failed`. */
  | { readonly kind: "compute"; readonly run: bigint; readonly product: Product }
  /** Keep something for graphs to come. */
  | { readonly kind: "keep"; readonly id: bigint; readonly sent: Sent }
  /** Make one array of the rows of some that graphs have, and forget these. */
  | { readonly kind: "join"; readonly id: bigint; readonly ids: readonly bigint[] }
  /** Forget what was kept for graphs, after all that was asked for before. */
  | { readonly kind: "discard"; readonly ids: readonly bigint[] }
  /** Run a graph, or return an array, after all that was asked for before; then as `compute`. */
  | { readonly kind: "graph"; readonly order: GraphOrder }
  | { readonly kind: "fetch"; readonly order: FetchOrder };

/** What answers a run that cannot be done. */
export function taskError(run: bigint, reason: string): Action {
  return { kind: "send", message: { type: "task_error", id: run, reason: cleanText(reason) } };
}
