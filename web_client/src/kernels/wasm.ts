/** The WASM SIMD kernel on one thread: products of matrices that lie in its memory. */

import { DType, depthOf, itemBytes, type Product, type Shape } from "./kernel";

/** A matrix at an address of the memory. */
export interface Placed extends Shape {
  readonly pointer: number;
}

/** A part of a result: some of its rows, whole. */
export interface Rows {
  readonly from: number;
  readonly to: number;
}

interface Exports {
  clear(scratch: number): void;
  accumulate(
    a: number,
    aRow: number,
    aDepth: number,
    b: number,
    bDepth: number,
    bColumn: number,
    dtype: number,
    rows: number,
    columns: number,
    depth: number,
    scratch: number,
  ): void;
  finish(
    scratch: number,
    rows: number,
    columns: number,
    out: number,
    outRow: number,
    dtype: number,
  ): void;
  readonly BLOCK_ROWS: WebAssembly.Global;
  readonly BLOCK_COLUMNS: WebAssembly.Global;
  readonly SCRATCH_BYTES: WebAssembly.Global;
}

/** matmul.wasm.ts's numbers of the dtypes. */
const CODES: { readonly [D in DType]: number } = {
  [DType.FP32]: 0,
  [DType.BF16]: 1,
  [DType.FP16]: 2,
};

/** Where the memory is free: below lies what the compiler may have put there. */
export const FIRST_FREE = 65536;

/** What one thread needs besides operands and results. */
export const SCRATCH_BYTES = 640 * 1024;

/** One thread's instance of the module. */
export class WasmMultiplier {
  readonly #exports: Exports;

  /**
   * @param module matmul.own.wasm, or matmul.shared.wasm with a shared memory
   * @param memory where operands, results and scratch lie
   */
  constructor(
    module: WebAssembly.Module,
    readonly memory: WebAssembly.Memory,
  ) {
    const instance = new WebAssembly.Instance(module, { env: { memory, abort } });
    this.#exports = instance.exports as unknown as Exports;
    if (this.#exports.SCRATCH_BYTES.value > SCRATCH_BYTES) {
      throw new Error(
        `the WASM kernel wants ${this.#exports.SCRATCH_BYTES.value} bytes of scratch`,
      );
    }
  }

  /**
   * Compute some rows of a product.
   *
   * @param product of matrices in the memory
   * @param rows which of the result
   * @param out where the whole result begins in the memory
   * @param scratch SCRATCH_BYTES of the memory, 16-byte aligned, that nobody else uses meanwhile
   */
  multiply(product: Product<Placed>, rows: Rows, out: number, scratch: number): void {
    const blockRows: number = this.#exports.BLOCK_ROWS.value;
    const blockColumns: number = this.#exports.BLOCK_COLUMNS.value;
    for (let column = 0; column < product.columns; column += blockColumns) {
      const columns = Math.min(blockColumns, product.columns - column);
      for (let row = rows.from; row < rows.to; row += blockRows) {
        this.#block(
          product,
          row,
          Math.min(blockRows, rows.to - row),
          column,
          columns,
          out,
          scratch,
        );
      }
    }
  }

  #block(
    product: Product<Placed>,
    row: number,
    rows: number,
    column: number,
    columns: number,
    out: number,
    scratch: number,
  ): void {
    this.#exports.clear(scratch);
    for (const [a, b] of product.pairs) {
      const [aRow, aDepth] = product.transposeA ? [1, a.columns] : [a.columns, 1];
      const [bDepth, bColumn] = product.transposeB ? [1, b.columns] : [b.columns, 1];
      this.#exports.accumulate(
        a.pointer + row * aRow * itemBytes(a.dtype),
        aRow,
        aDepth,
        b.pointer + column * bColumn * itemBytes(b.dtype),
        bDepth,
        bColumn,
        CODES[a.dtype],
        rows,
        columns,
        depthOf(a, product.transposeA),
        scratch,
      );
    }
    const at = out + (row * product.columns + column) * itemBytes(product.out);
    this.#exports.finish(scratch, rows, columns, at, product.columns, CODES[product.out]);
  }
}

function abort(): never {
  throw new Error("the WASM kernel stopped");
}
