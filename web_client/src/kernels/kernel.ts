/** What multiplies: the words that all kernels share. */

/** Element types, little-endian. */
export enum DType {
  FP32 = "fp32",
  BF16 = "bf16",
  FP16 = "fp16",
}

/** Bytes of one element. */
export function itemBytes(dtype: DType): number {
  return dtype === DType.FP32 ? 4 : 2;
}

/** The dtype of that name, or undefined. */
export function dtypeNamed(name: string): DType | undefined {
  return Object.values(DType).find((dtype) => dtype === name);
}

/** The kernels, best first where a browser has all. */
export enum KernelName {
  WEBGPU = "webgpu",
  WASM = "wasm",
  JS = "js",
}

/** The shape and type of a matrix; its elements lie row by row. */
export interface Shape {
  readonly rows: number;
  readonly columns: number;
  readonly dtype: DType;
}

/** A matrix; a kernel that holds it may know it by its identity. */
export interface Matrix extends Shape {
  /** Its elements, row by row, at any alignment; empty once a kernel holds them elsewhere. */
  payload: Uint8Array;
}

/** A product to compute: the sum over all pairs of op(a) op(b), rounded once to `out`. */
export interface Product<M extends Shape = Matrix> {
  readonly pairs: readonly (readonly [M, M])[];
  readonly transposeA: boolean;
  readonly transposeB: boolean;
  /** Of the result. */
  readonly rows: number;
  readonly columns: number;
  readonly out: DType;
}

/** Floating-point operations of a product, two for each multiply-add. */
export function flopsOf(product: Product<Shape>): number {
  const depth = product.pairs.reduce((sum, [a]) => sum + depthOf(a, product.transposeA), 0);
  return 2 * product.rows * product.columns * depth;
}

/** Columns of op(a), which are the rows of op(b). */
export function depthOf(a: Shape, transposeA: boolean): number {
  return transposeA ? a.rows : a.columns;
}

/**
 * A finished product: the result's elements, and how long the arithmetic took. Where several are
 * computed at once, their times add up to that in which any was.
 */
export interface Outcome {
  readonly payload: Uint8Array;
  readonly compute_s: number;
}

/** Multiplies without holding up who asks. */
export interface Kernel {
  readonly name: KernelName;
  /** For people: threads, the GPU's name. */
  readonly about: string;
  /** Keep a matrix for products to come; the kernel may empty its payload. */
  hold(matrix: Matrix): void;
  /** No further product will name the matrix. Those that were asked for go on reading it. */
  forget(matrix: Matrix): void;
  /**
   * Compute a product of matrices that are held.
   *
   * @param wanted asked before the arithmetic begins; if not, the outcome is null
   * @throws Error when it cannot be computed
   */
  multiply(product: Product, wanted: () => boolean): Promise<Outcome | null>;
  /** Resolves with the reason if the kernel is of no more use, as when a GPU is lost. */
  readonly lost: Promise<string>;
  /** Give everything back; what is under way is never answered. */
  close(): void;
}
