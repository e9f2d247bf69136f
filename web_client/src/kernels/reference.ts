/** Is a kernel right? Its products against sums in double precision, on sizes that are awkward. */

import {
  DType,
  depthOf,
  flopsOf,
  itemBytes,
  type Kernel,
  type Matrix,
  type Product,
} from "./kernel";
import { narrow, widen } from "./numbers";

/** One product to try a kernel with. */
export interface Trial {
  readonly name: string;
  readonly product: Product;
}

/** Half the distance between neighbours, relative, and the smallest such distance. */
const ROUNDING: { readonly [D in DType]: { relative: number; smallest: number } } = {
  [DType.FP32]: { relative: 2 ** -24, smallest: 2 ** -126 },
  [DType.BF16]: { relative: 2 ** -8, smallest: 2 ** -126 },
  [DType.FP16]: { relative: 2 ** -11, smallest: 2 ** -24 },
};

/**
 * A product of random matrices.
 *
 * @param depths of its pairs
 * @param random numbers from 0 to 1
 */
export function randomProduct(
  rows: number,
  columns: number,
  depths: readonly number[],
  dtype: DType,
  random: () => number,
  options: { transposeA?: boolean; transposeB?: boolean; out?: DType } = {},
): Product {
  const { transposeA = false, transposeB = false, out = dtype } = options;
  const matrix = (r: number, c: number): Matrix => {
    const values = Float32Array.from({ length: r * c }, () => 2 * random() - 1);
    return { rows: r, columns: c, dtype, payload: narrow(values, dtype) };
  };
  return {
    pairs: depths.map((depth) => [
      transposeA ? matrix(depth, rows) : matrix(rows, depth),
      transposeB ? matrix(columns, depth) : matrix(depth, columns),
    ]),
    transposeA,
    transposeB,
    rows,
    columns,
    out,
  };
}

/** The products that a kernel must get right before it is used. */
export function trials(random: () => number): Trial[] {
  const sides: [number, number, number[]][] = [
    [1, 1, [1]],
    [3, 1, [3]],
    [7, 13, [5, 1]],
    [127, 65, [3]],
    [33, 127, [127, 64]],
    [2, 3, [0]],
    [5, 70, [20]],
    [70, 5, [20]],
    [1, 2, [1000, 3]],
  ];
  const turns = [
    { transposeA: false, transposeB: false },
    { transposeA: false, transposeB: true },
    { transposeA: true, transposeB: false },
    { transposeA: true, transposeB: true },
  ];
  const made: Trial[] = [];
  for (const dtype of Object.values(DType)) {
    for (const [i, [rows, columns, depths]] of sides.entries()) {
      const turn = turns[made.length % 4] as (typeof turns)[number];
      const out = i % 2 ? DType.FP32 : dtype;
      const product = randomProduct(rows, columns, depths, dtype, random, { ...turn, out });
      made.push({ name: `${rows}x${depths.join("+")}x${columns} ${dtype} to ${out}`, product });
    }
  }
  return made;
}

/**
 * The largest error of a result, as a share of what rounding allows; above 1 it is wrong.
 *
 * What is allowed for an element: the error bound of an fp32 sum of that many products in any
 * order, and half the distance of neighbouring numbers of `out`.
 */
export function errorShare(product: Product, payload: Uint8Array): number {
  if (payload.length !== product.rows * product.columns * itemBytes(product.out)) {
    return Number.POSITIVE_INFINITY;
  }
  const got = widen(payload, product.out);
  const { exact, magnitudes, depth } = exactly(product);
  const { relative, smallest } = ROUNDING[product.out];
  let worst = 0;
  for (let i = 0; i < exact.length; i++) {
    const sum = exact[i] as number;
    const allowed =
      (depth + 1) * 2 ** -24 * (magnitudes[i] as number) + relative * Math.abs(sum) + smallest;
    const share = Math.abs((got[i] as number) - sum) / allowed;
    if (!(share <= worst)) worst = share; // NaN is worse than anything
    if (Number.isNaN(worst)) return Number.POSITIVE_INFINITY;
  }
  return worst;
}

/** The largest error of a result, relative to the sum of the products' magnitudes. */
export function relativeError(product: Product, payload: Uint8Array): number {
  const got = widen(payload, product.out);
  const { exact, magnitudes } = exactly(product);
  let worst = 0;
  for (let i = 0; i < exact.length; i++) {
    const error = Math.abs((got[i] as number) - (exact[i] as number));
    if (error > 0) worst = Math.max(worst, error / (magnitudes[i] as number));
  }
  return worst;
}

/** Sums and sums of magnitudes in double precision. */
function exactly(product: Product): {
  exact: Float64Array;
  magnitudes: Float64Array;
  depth: number;
} {
  const { rows, columns } = product;
  const exact = new Float64Array(rows * columns);
  const magnitudes = new Float64Array(rows * columns);
  let whole = 0;
  for (const [a, b] of product.pairs) {
    const depth = depthOf(a, product.transposeA);
    whole += depth;
    const left = widen(a.payload, a.dtype);
    const right = widen(b.payload, b.dtype);
    for (let i = 0; i < rows; i++) {
      for (let j = 0; j < columns; j++) {
        let sum = 0;
        let magnitude = 0;
        for (let k = 0; k < depth; k++) {
          const x = left[product.transposeA ? k * rows + i : i * depth + k] as number;
          const y = right[product.transposeB ? j * depth + k : k * columns + j] as number;
          sum += x * y;
          magnitude += Math.abs(x * y);
        }
        exact[i * columns + j] = (exact[i * columns + j] as number) + sum;
        magnitudes[i * columns + j] = (magnitudes[i * columns + j] as number) + magnitude;
      }
    }
  }
  return { exact, magnitudes, depth: whole };
}

/**
 * A kernel's worst `errorShare` over products; the matrices' payloads are left as they were.
 *
 * @throws Error what the kernel throws
 */
export async function worstError(kernel: Kernel, products: readonly Trial[]): Promise<number> {
  let worst = 0;
  for (const { product } of products) {
    worst = Math.max(worst, errorShare(product, await once(kernel, product)));
  }
  return worst;
}

/** One product by a kernel that holds its matrices only for that long; its elements. */
export async function once(kernel: Kernel, product: Product): Promise<Uint8Array> {
  const { held, matrices } = copied(product);
  for (const matrix of matrices) kernel.hold(matrix);
  try {
    const outcome = await kernel.multiply(held, () => true);
    if (outcome === null) throw new Error("a kernel did not compute what was wanted");
    return outcome.payload;
  } finally {
    for (const matrix of matrices) kernel.forget(matrix);
  }
}

/**
 * The speed that a kernel sustains on large fp32 products, four at a time, in FLOP/s. A first round
 * does not count, because the kernel may compile or allocate in it.
 *
 * @param side of the square matrices
 * @param budget_s duration of the measurement
 * @param now_s a clock
 */
export async function flopsPerSecond(
  kernel: Kernel,
  side: number,
  budget_s: number,
  random: () => number,
  now_s: () => number,
): Promise<number> {
  const { held, matrices } = copied(randomProduct(side, side, [side], DType.FP32, random));
  for (const matrix of matrices) kernel.hold(matrix);
  const at_once = 4;
  const round = () =>
    Promise.all(Array.from({ length: at_once }, () => kernel.multiply(held, () => true)));
  await round();
  const began_s = now_s();
  let rounds = 0;
  do {
    await round();
    rounds++;
  } while (now_s() - began_s < budget_s);
  const took_s = now_s() - began_s;
  for (const matrix of matrices) kernel.forget(matrix);
  return (rounds * at_once * flopsOf(held)) / took_s;
}

/** The product over copies of its matrices, whose payloads a kernel may take. */
function copied(product: Product): { held: Product; matrices: Matrix[] } {
  const pairs = product.pairs.map(([a, b]) => [{ ...a }, { ...b }] as const);
  return { held: { ...product, pairs }, matrices: pairs.flat() };
}
