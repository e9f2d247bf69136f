import { deflateSync, inflateSync } from "node:zlib";
import { describe, expect, test } from "vitest";
import { decode, encode, encodeIfShorter, LEAST_BYTES } from "../../src/coding/exponents";
import { deflate, inflate } from "../../src/coding/zlib";
import { DType, itemBytes } from "../../src/kernels/kernel";
import { narrow } from "../../src/kernels/numbers";
import { ProtocolError } from "../../src/protocol/errors";
import { seeded } from "../kernels/random";
import { bytesOf, type Hex, vectors } from "../vectors";

interface Vector {
  name: string;
  dtype: DType;
  coded: Hex;
  payload_bytes: number | bigint;
  payload?: Hex;
}

describe("coding.json", () => {
  test.each(vectors<Vector>("coding.json"))("$name", ({ dtype, coded, payload_bytes, payload }) => {
    const read = () => decode(bytesOf(coded), dtype, Number(payload_bytes));
    if (payload === undefined) expect(read).toThrow(ProtocolError);
    else expect(same(read(), bytesOf(payload))).toBe(true);
  });
});

const random = seeded(7);

function same(a: Uint8Array, b: Uint8Array): boolean {
  return Buffer.compare(a, b) === 0;
}

function noise(bytes: number): Uint8Array {
  return Uint8Array.from({ length: bytes }, () => random() * 256);
}

/** Bytes of which few are frequent: Fibonacci's numbers make the longest Huffman codes. */
function skewed(bytes: number): Uint8Array {
  return Uint8Array.from({ length: bytes }, () => Math.min(255, Math.floor(-Math.log2(random()))));
}

/** Numbers around 1 as a model has them. */
function weights(count: number, dtype: DType): Uint8Array {
  const normal = () => Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random());
  return narrow(
    Float32Array.from({ length: count }, () => 0.02 * normal()),
    dtype,
  );
}

const SIZES = [0, 1, 2, 3, 255, 4097, 32768, 32769, 100_003];

describe.each(Object.values(DType))("%s", (dtype) => {
  const size = itemBytes(dtype);

  test.each(SIZES)("any bits of %d elements come back", (count) => {
    // Among random bits are NaNs of all kinds, infinities and subnormal numbers.
    for (const payload of [noise(count * size), skewed(count * size), weights(count, dtype)]) {
      const shifted = new Uint8Array(payload.length + 1).subarray(1); // at any alignment
      shifted.set(payload);
      const coded = encode(shifted, dtype);
      expect(same(decode(coded, dtype, payload.length), payload)).toBe(true);
    }
  });

  test("no byte of a coded array can be left out or added", () => {
    const payload = weights(50, dtype);
    const coded = encode(payload, dtype);
    for (let cut = 0; cut < coded.length; cut++) {
      expect(() => decode(coded.subarray(0, cut), dtype, payload.length)).toThrow(ProtocolError);
    }
    const longer = Uint8Array.of(...coded, 0);
    expect(() => decode(longer, dtype, payload.length)).toThrow(ProtocolError);
    for (const other of [payload.length - size, payload.length + size, payload.length + 1]) {
      expect(() => decode(coded, dtype, other)).toThrow(ProtocolError);
    }
  });

  test("what has changed on the way is refused, or is an array of that size", () => {
    const payload = weights(300, dtype);
    const coded = encode(payload, dtype);
    for (let at = 0; at < coded.length; at++) {
      const changed = coded.slice();
      changed[at]! ^= 1 << Math.floor(random() * 8);
      try {
        expect(decode(changed, dtype, payload.length)).toHaveLength(payload.length);
      } catch (error) {
        expect(error).toBeInstanceOf(ProtocolError);
      }
    }
  });
});

test("an array of two chunks comes back", () => {
  const payload = weights(2 ** 20 + 7, DType.BF16);
  const coded = encode(payload, DType.BF16);
  expect(coded.length / payload.length).toBeLessThan(0.7);
  expect(same(decode(coded, DType.BF16, payload.length), payload)).toBe(true);
});

test("only what gets shorter is coded", () => {
  const payload = weights(LEAST_BYTES / 2, DType.BF16);
  expect(encodeIfShorter(payload, DType.BF16)!.length).toBeLessThan(payload.length);
  expect(encodeIfShorter(payload.subarray(2), DType.BF16)).toBeNull();
  expect(encodeIfShorter(noise(LEAST_BYTES), DType.BF16)).toBeNull();
});

describe("streams", () => {
  test.each(SIZES.slice(1))("another zlib reads ours of %d bytes", (count) => {
    for (const data of [noise(count), skewed(count), new Uint8Array(count)]) {
      expect(same(inflateSync(deflate(data)), data)).toBe(true);
    }
  });

  test.each(SIZES)("we read another zlib's of %d bytes, of every kind", (count) => {
    for (const data of [noise(count), skewed(count), new Uint8Array(count)]) {
      for (const level of [0, 1, 6, 9]) {
        for (const strategy of [0, 1, 2, 3, 4]) {
          const into = new Uint8Array(count);
          inflate(deflateSync(data, { level, strategy }), into);
          expect(same(into, data)).toBe(true);
        }
      }
    }
  });

  test("a bomb is not unpacked", () => {
    const bomb = deflateSync(new Uint8Array(50 * 2 ** 20));
    expect(() => inflate(bomb, new Uint8Array(2))).toThrow(/no whole stream of 2 bytes/);
  });
});
