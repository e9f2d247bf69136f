import { describe, expect, test } from "vitest";
import { DType, dtypeNamed, type Matrix, type Product } from "../../src/kernels/kernel";
import { fromFp16, toBf16, toFp16 } from "../../src/kernels/numbers";
import { multiplyPlain } from "../../src/kernels/plain";
import { errorShare, randomProduct, trials } from "../../src/kernels/reference";
import { bytesOf, type Hex, vectors } from "../vectors";
import { seeded } from "./random";
import { multiplyWasm } from "./wasm_modules";

interface MatmulVector {
  name: string;
  put: { id: number; rows: number; columns: number; dtype: string; payload: Hex }[];
  run: { inputs: number[]; transpose_a: boolean; transpose_b: boolean; out: string };
  result: { rows: number; columns: number; payload: Hex };
}

function productOf({ put, run, result }: MatmulVector): Product {
  const matrices = new Map<number, Matrix>();
  for (const { id, rows, columns, dtype, payload } of put) {
    const type = dtypeNamed(dtype) as DType;
    matrices.set(id, { rows, columns, dtype: type, payload: bytesOf(payload) });
  }
  const inputs = run.inputs.map((id) => matrices.get(id) as Matrix);
  const pairs: [Matrix, Matrix][] = [];
  for (let i = 0; i < inputs.length; i += 2) {
    pairs.push([inputs[i] as Matrix, inputs[i + 1] as Matrix]);
  }
  const { rows, columns } = result;
  const out = dtypeNamed(run.out) as DType;
  return {
    pairs,
    transposeA: run.transpose_a,
    transposeB: run.transpose_b,
    rows,
    columns,
    out,
  };
}

describe.each([
  ["js", multiplyPlain],
  ["wasm", multiplyWasm],
] as const)("%s", (_, multiply) => {
  test.each(vectors<MatmulVector>("matmul.json"))("vector $name", (vector) => {
    expect(multiply(productOf(vector))).toEqual(bytesOf(vector.result.payload));
  });

  test.each(trials(seeded(1)))("trial $name", ({ product }) => {
    expect(errorShare(product, multiply(product))).toBeLessThanOrEqual(1);
  });

  test.each([
    [1, 1, 1],
    [3, 3, 3],
    [127, 127, 127],
    [250, 333, 129],
    [129, 257, 600],
  ])("%ix%i by depth %i, every dtype and transpose", (rows, columns, depth) => {
    for (const dtype of Object.values(DType)) {
      for (const transposeA of [false, true]) {
        for (const transposeB of [false, true]) {
          const options = { transposeA, transposeB };
          const product = randomProduct(rows, columns, [depth], dtype, seeded(2), options);
          expect(errorShare(product, multiply(product))).toBeLessThanOrEqual(1);
        }
      }
    }
  });
});

test("every fp16 survives widening and rounding", () => {
  for (let bits = 0; bits < 0x10000; bits++) {
    const value = fromFp16(bits);
    if (Number.isNaN(value)) expect(Number.isNaN(fromFp16(toFp16(value)))).toBe(true);
    else expect(toFp16(value)).toBe(bits);
  }
});

test("WASM widens and rounds every fp16 and bf16 as plain JavaScript does", () => {
  const halves = Uint16Array.from({ length: 0x10000 }, (_, i) => i);
  const payload = new Uint8Array(halves.buffer);
  for (const dtype of [DType.FP16, DType.BF16]) {
    const one = Uint8Array.of(...(dtype === DType.FP16 ? [0x00, 0x3c] : [0x80, 0x3f]));
    for (const columns of [1, 0x10000]) {
      const product: Product = {
        pairs: [
          columns === 1
            ? [
                { rows: 0x10000, columns: 1, dtype, payload },
                { rows: 1, columns: 1, dtype, payload: one },
              ]
            : [
                { rows: 1, columns: 1, dtype, payload: one },
                { rows: 1, columns: 0x10000, dtype, payload },
              ],
        ],
        transposeA: false,
        transposeB: false,
        rows: 0x10000 / columns,
        columns,
        out: dtype,
      };
      const result = new Uint16Array(multiplyWasm(product).slice().buffer);
      let wrong = 0;
      for (let bits = 0; bits < 0x10000; bits++) {
        const exponent = dtype === DType.FP16 ? 0x7c00 : 0x7f80;
        const isNan = (bits & 0x7fff) > exponent;
        const got = result[bits] as number;
        if (bits === 0x8000) continue; // the sum 0 + -0 is +0
        if (isNan ? (got & 0x7fff) <= exponent : got !== bits) wrong += 1;
      }
      expect(wrong).toBe(0);
    }
  }
});

test("rounding is to nearest, ties to even", () => {
  expect(toFp16(65519)).toBe(0x7bff);
  expect(toFp16(65520)).toBe(0x7c00);
  expect(toFp16(2049)).toBe(0x6800);
  expect(toFp16(2 ** -25)).toBe(0);
  expect(toFp16(3 * 2 ** -25)).toBe(2);
  expect(toBf16(257)).toBe(0x4380);
  expect(toBf16(259)).toBe(0x4382);
  expect(toBf16(Number.NaN) & 0x7fff).toBeGreaterThan(0x7f80);
});
