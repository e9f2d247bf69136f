/** The kernel of last resort: plain JavaScript, which every browser has. */

import { depthOf, type Matrix, type Product } from "./kernel";
import { narrow, widen } from "./numbers";

/**
 * The result's elements. Sums are kept in double precision, over all pairs, and rounded once to
 * fp32, then to `out` (an fp32 sum is what the protocol rounds).
 */
export function multiplyPlain(product: Product): Uint8Array<ArrayBuffer> {
  const { rows, columns } = product;
  const sums = new Float64Array(rows * columns);
  for (const [a, b] of product.pairs) {
    const depth = depthOf(a, product.transposeA);
    const left = elements(a, product.transposeA); // rows of op(a)
    const right = elements(b, !product.transposeB); // columns of op(b)
    addProduct(left, right, rows, columns, depth, sums);
  }
  return narrow(Float32Array.from(sums), product.out);
}

/** sums += left right^T, four columns at a time so that an element of `left` is read once for four. */
function addProduct(
  left: Float32Array,
  right: Float32Array,
  rows: number,
  columns: number,
  depth: number,
  sums: Float64Array,
): void {
  for (let row = 0; row < rows; row++) {
    const a = row * depth;
    let column = 0;
    for (; column + 4 <= columns; column += 4) {
      const b0 = column * depth;
      const b1 = b0 + depth;
      const b2 = b1 + depth;
      const b3 = b2 + depth;
      let s0 = 0;
      let s1 = 0;
      let s2 = 0;
      let s3 = 0;
      for (let k = 0; k < depth; k++) {
        const x = left[a + k] as number;
        s0 += x * (right[b0 + k] as number);
        s1 += x * (right[b1 + k] as number);
        s2 += x * (right[b2 + k] as number);
        s3 += x * (right[b3 + k] as number);
      }
      const at = row * columns + column;
      sums[at] = (sums[at] as number) + s0;
      sums[at + 1] = (sums[at + 1] as number) + s1;
      sums[at + 2] = (sums[at + 2] as number) + s2;
      sums[at + 3] = (sums[at + 3] as number) + s3;
    }
    for (; column < columns; column++) {
      const b = column * depth;
      let sum = 0;
      for (let k = 0; k < depth; k++) sum += (left[a + k] as number) * (right[b + k] as number);
      const at = row * columns + column;
      sums[at] = (sums[at] as number) + sum;
    }
  }
}

/** A matrix widened to fp32, or its transpose, row by row. */
function elements(matrix: Matrix, transposed: boolean): Float32Array {
  const wide = widen(matrix.payload, matrix.dtype);
  if (!transposed) return wide;
  const { rows, columns } = matrix;
  const turned = new Float32Array(wide.length);
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      turned[column * rows + row] = wide[row * columns + column] as number;
    }
  }
  return turned;
}
