/**
 * Fewer bytes for floating-point payloads, exact to the bit: docs/protocol.md, *Coding*. Exponents
 * are deflated, all else travels as it is; `cleave/coding.py` is the same in Python.
 */

import { type DType, itemBytes } from "../kernels/kernel";
import { ProtocolError } from "../protocol/errors";
import { CODED_CHUNK } from "../protocol/limits";
import { deflate, inflate } from "./zlib";

/** Shorter payloads are not worth it. */
export const LEAST_BYTES = 16384;

const WORTH = 0.95; // of the plain size; above it coding takes time for nearly nothing
const SAMPLE = 4096; // elements
const LENGTH_BYTES = 4;

/** The coded form of elements, whether that is shorter or not. */
export function encode(payload: Uint8Array, dtype: DType): Uint8Array<ArrayBuffer> {
  const step = CODED_CHUNK * itemBytes(dtype);
  const parts: Uint8Array[] = [];
  for (let at = 0; at < payload.length; at += step) {
    parts.push(...encodedChunk(payload.subarray(at, at + step), itemBytes(dtype)));
  }
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

/** The coded form of elements; null if they are few, or it would hardly be shorter. */
export function encodeIfShorter(payload: Uint8Array, dtype: DType): Uint8Array | null {
  if (payload.length < LEAST_BYTES || sampledRatio(payload, itemBytes(dtype)) > WORTH) return null;
  const coded = encode(payload, dtype);
  return coded.length < payload.length ? coded : null;
}

/**
 * The elements of a coded form. It takes memory for them once the coded form is seen to have the
 * length that theirs has, which is more than half of what they take.
 *
 * @param bytes what the elements take
 * @throws ProtocolError when it is not the coded form of so many bytes of elements
 */
export function decode(coded: Uint8Array, dtype: DType, bytes: number): Uint8Array {
  const size = itemBytes(dtype);
  const chunks = chunksOf(coded, size, bytes);
  const payload = new Uint8Array(bytes);
  for (const [n, chunk] of chunks.entries()) {
    const at = n * CODED_CHUNK * size;
    decodeChunk(chunk, payload.subarray(at, at + CODED_CHUNK * size), size);
  }
  return payload;
}

/** A chunk: what is deflated of it, and what is not. */
interface Chunk {
  readonly deflated: Uint8Array;
  readonly plain: Uint8Array;
}

function chunksOf(coded: Uint8Array, size: number, bytes: number): Chunk[] {
  if (bytes % size) throw new ProtocolError(`no array of ${size}-byte elements has ${bytes} bytes`);
  const lengths = new DataView(coded.buffer, coded.byteOffset, coded.byteLength);
  const chunks: Chunk[] = [];
  let at = 0;
  for (let left = bytes / size; left > 0; left -= CODED_CHUNK) {
    const begin = at + LENGTH_BYTES;
    const middle = begin > coded.length ? begin : begin + lengths.getUint32(at, true);
    at = middle + Math.min(left, CODED_CHUNK) * (size - 1);
    if (at > coded.length) {
      throw new ProtocolError(
        `a coded array of ${bytes} bytes is cut off after ${coded.length} bytes`,
      );
    }
    chunks.push({ deflated: coded.subarray(begin, middle), plain: coded.subarray(middle, at) });
  }
  if (at < coded.length) {
    throw new ProtocolError(`${coded.length - at} bytes follow the end of a coded array`);
  }
  return chunks;
}

/** The parts of a chunk's coded form. Of an element, its last two bytes are its word. */
function encodedChunk(payload: Uint8Array, size: number): Uint8Array[] {
  const count = payload.length / size;
  const upper = new Uint8Array(count);
  const plain = new Uint8Array(count * (size - 1));
  for (let i = 0, at = size - 2; i < count; i++, at += size) {
    const low = payload[at]!;
    const high = payload[at + 1]!;
    upper[i] = (high << 1) | (low >> 7);
    plain[i] = (low << 1) | (high >> 7);
  }
  if (size === 4) {
    for (let i = 0, to = count; i < payload.length; i += 4, to += 2) {
      plain[to] = payload[i]!;
      plain[to + 1] = payload[i + 1]!;
    }
  }
  const deflated = deflate(upper);
  const length = new Uint8Array(LENGTH_BYTES);
  new DataView(length.buffer).setUint32(0, deflated.length, true);
  return [length, deflated, plain];
}

function decodeChunk({ deflated, plain }: Chunk, payload: Uint8Array, size: number): void {
  const count = payload.length / size;
  const upper = new Uint8Array(count);
  inflate(deflated, upper);
  for (let i = 0, at = size - 2; i < count; i++, at += size) {
    const exponent = upper[i]!;
    const rest = plain[i]!;
    payload[at] = (exponent << 7) | (rest >> 1);
    payload[at + 1] = (rest << 7) | (exponent >> 1);
  }
  if (size === 4) {
    for (let i = 0, from = count; i < payload.length; i += 4, from += 2) {
      payload[i] = plain[from]!;
      payload[i + 1] = plain[from + 1]!;
    }
  }
}

/** The coded size over the plain size, as the entropy of some elements has it. */
function sampledRatio(payload: Uint8Array, size: number): number {
  const count = payload.length / size;
  const step = Math.max(1, Math.floor(count / SAMPLE));
  const counts = new Map<number, number>();
  let total = 0;
  for (let at = size - 2; at < payload.length; at += step * size) {
    const upper = ((payload[at + 1]! << 1) | (payload[at]! >> 7)) & 0xff;
    counts.set(upper, (counts.get(upper) ?? 0) + 1);
    total += 1;
  }
  let bits = 0;
  for (const n of counts.values()) bits -= (n / total) * Math.log2(n / total);
  return (size - 1 + bits / 8) / size;
}
