/** 16-bit floats in plain JavaScript: widened exactly, rounded to nearest, ties to even. */

import { DType, itemBytes } from "./kernel";

const scratch = new DataView(new ArrayBuffer(4));

function bitsOf(value: number): number {
  scratch.setFloat32(0, value);
  return scratch.getUint32(0);
}

function floatOf(bits: number): number {
  scratch.setUint32(0, bits);
  return scratch.getFloat32(0);
}

/** The fp32 number of a bf16's bits. */
export function fromBf16(bits: number): number {
  return floatOf((bits << 16) >>> 0);
}

/** The bits of the bf16 nearest to an fp32 number. */
export function toBf16(value: number): number {
  const bits = bitsOf(value);
  if (Number.isNaN(value)) return (bits >>> 16) | 0x40;
  return ((bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16) & 0xffff;
}

/** The number of an fp16's bits. */
export function fromFp16(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 0x1f) return fraction ? Number.NaN : sign * Number.POSITIVE_INFINITY;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

/** The bits of the fp16 nearest to an fp32 number. */
export function toFp16(value: number): number {
  const bits = bitsOf(value);
  const sign = (bits >>> 16) & 0x8000;
  const magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x47800000) return sign | 0x7c00; // 65536 and more
  // Below the normal numbers, adding 0.5 in fp32 rounds at the last place of an fp16.
  if (magnitude < 0x38800000) return sign | (bitsOf(floatOf(magnitude) + 0.5) - 0x3f000000);
  return sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >>> 13) & 1)) >>> 13);
}

/** Elements, at any alignment, as fp32. */
export function widen(payload: Uint8Array, dtype: DType): Float32Array<ArrayBuffer> {
  const items = payload.length / itemBytes(dtype);
  const bytes = aligned(payload);
  if (dtype === DType.FP32) return new Float32Array(bytes.buffer, bytes.byteOffset, items).slice();
  const halves = new Uint16Array(bytes.buffer, bytes.byteOffset, items);
  const wide = new Float32Array(items);
  if (dtype === DType.BF16) {
    const bits = new Uint32Array(wide.buffer);
    for (let i = 0; i < items; i++) bits[i] = (halves[i] as number) << 16;
  } else {
    for (let i = 0; i < items; i++) wide[i] = fromFp16(halves[i] as number);
  }
  return wide;
}

/** fp32 elements as bytes of `dtype`, each rounded once. */
export function narrow(values: Float32Array<ArrayBuffer>, dtype: DType): Uint8Array<ArrayBuffer> {
  if (dtype === DType.FP32) {
    return new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
  }
  const round = dtype === DType.BF16 ? toBf16 : toFp16;
  const halves = new Uint16Array(values.length);
  for (let i = 0; i < values.length; i++) halves[i] = round(values[i] as number);
  return new Uint8Array(halves.buffer);
}

/** The same bytes at an address that typed arrays of four-byte items accept. */
function aligned(bytes: Uint8Array): Uint8Array {
  return bytes.byteOffset % 4 === 0 ? bytes : bytes.slice();
}
