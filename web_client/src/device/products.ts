/** From a `run` to the product that it asks for. */

import { type DType, dtypeNamed, type Matrix, type Product } from "../kernels/kernel";
import { ProtocolError } from "../protocol/errors";
import { type MessageOf, Op } from "../protocol/messages";

/** Why one run cannot be done; the session goes on. */
export class CannotRun extends Error {
  /** @param lost arrays that the run was to replace, which have no value any more */
  constructor(
    reason: string,
    readonly lost: readonly bigint[] = [],
  ) {
    super(reason);
  }
}

/**
 * What a run asks for.
 *
 * @param matrixOf the matrix of a name; it throws where there is none
 * @throws CannotRun when its matrices have no such product
 */
export function productOf(
  message: MessageOf<"run">,
  out: DType,
  matrixOf: (id: bigint) => Matrix,
): Product {
  if (message.op !== Op.MATMUL) {
    throw new CannotRun(`this device has no op '${message.op}', only 'matmul'`);
  }
  if (message.inputs.length === 0 || message.inputs.length % 2) {
    throw new CannotRun(`matmul needs pairs of arrays, not ${message.inputs.length}`);
  }
  const { transpose_a: transposeA, transpose_b: transposeB } = message;
  const pairs: [Matrix, Matrix][] = [];
  let rows = 0;
  let columns = 0;
  for (let i = 0; i < message.inputs.length; i += 2) {
    const a = matrixOf(message.inputs[i] as bigint);
    const b = matrixOf(message.inputs[i + 1] as bigint);
    const [m, depth] = transposeA ? [a.columns, a.rows] : [a.rows, a.columns];
    const [bDepth, n] = transposeB ? [b.columns, b.rows] : [b.rows, b.columns];
    const dtype = pairs[0]?.[0].dtype ?? a.dtype;
    if (depth !== bDepth || a.dtype !== dtype || b.dtype !== dtype) {
      throw new CannotRun(
        `a ${m}x${depth} ${a.dtype} array cannot be multiplied by a ${bDepth}x${n} ` +
          `${b.dtype} one`,
      );
    }
    if (i > 0 && (m !== rows || n !== columns)) {
      throw new CannotRun(`products of different shapes cannot be added: ${m}x${n}`);
    }
    [rows, columns] = [m, n];
    pairs.push([a, b]);
  }
  if (out !== "fp32" && out !== pairs[0]?.[0].dtype) {
    throw new CannotRun(`the result is asked for as ${out}, which no input is`);
  }
  return { pairs, transposeA, transposeB, rows, columns, out };
}

/** @throws ProtocolError when there is no dtype of that name */
export function knownDtype(name: string): DType {
  const dtype = dtypeNamed(name);
  if (dtype === undefined) throw new ProtocolError(`unknown dtype '${name.slice(0, 40)}'`);
  return dtype;
}
