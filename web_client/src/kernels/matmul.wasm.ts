/**
 * Matrix multiplication on raw pointers, in AssemblyScript: 4x8 blocks of SIMD accumulators over
 * packed panels (Goto's scheme). Nothing is allocated here: every thread brings its own scratch, so
 * threads may share one memory.
 *
 * One *block* of the result, at most BLOCK_ROWS x BLOCK_COLUMNS, is summed in fp32 in the scratch:
 * `clear`, then `accumulate` once for every pair of operands, then `finish`, which rounds it once.
 *
 * Scratch: packed rows of A | packed columns of B | sums, as 4x8 tiles, tile after tile.
 */

export const BLOCK_ROWS: i32 = 128;
export const BLOCK_COLUMNS: i32 = 256;
/** How deep the packed panels are: both fit into a small second-level cache. */
const DEPTH: i32 = 256;

const TILE_ROWS: i32 = 4;
const TILE_COLUMNS: i32 = 8;
const TILE_BYTES: i32 = TILE_ROWS * TILE_COLUMNS * 4;

const PACKED_A: usize = 0;
const PACKED_B: usize = BLOCK_ROWS * DEPTH * 4;
const SUMS: usize = PACKED_B + BLOCK_COLUMNS * DEPTH * 4;
export const SCRATCH_BYTES: usize = SUMS + BLOCK_ROWS * BLOCK_COLUMNS * 4;

/** Element types, by the numbers that callers use. */
const FP32: i32 = 0;
const BF16: i32 = 1;
const FP16: i32 = 2;

/** Sets the sums of a block to zero. */
export function clear(scratch: usize): void {
  memory.fill(scratch + SUMS, 0, BLOCK_ROWS * BLOCK_COLUMNS * 4);
}

/**
 * Adds op(A) op(B) to the sums of a block.
 *
 * @param a the first element of the block's rows of op(A); `aRow`, `aDepth`: elements from one row
 *   to the next, and from one column to the next
 * @param b the first element of the block's columns of op(B), likewise
 * @param dtype of both
 * @param rows, columns of the block; `depth`: of the product
 */
export function accumulate(
  a: usize,
  aRow: i32,
  aDepth: i32,
  b: usize,
  bDepth: i32,
  bColumn: i32,
  dtype: i32,
  rows: i32,
  columns: i32,
  depth: i32,
  scratch: usize,
): void {
  const bytes: usize = dtype === FP32 ? 4 : 2;
  for (let from = 0; from < depth; from += DEPTH) {
    const some = min(DEPTH, depth - from);
    const aFrom = a + <usize>from * aDepth * bytes;
    const bFrom = b + <usize>from * bDepth * bytes;
    if (dtype === FP32) {
      packA<f32>(aFrom, aRow, aDepth, FP32, rows, some, scratch + PACKED_A);
      packB<f32>(bFrom, bDepth, bColumn, FP32, columns, some, scratch + PACKED_B);
    } else if (dtype === BF16) {
      packA<u16>(aFrom, aRow, aDepth, BF16, rows, some, scratch + PACKED_A);
      packB<u16>(bFrom, bDepth, bColumn, BF16, columns, some, scratch + PACKED_B);
    } else {
      packA<u16>(aFrom, aRow, aDepth, FP16, rows, some, scratch + PACKED_A);
      packB<u16>(bFrom, bDepth, bColumn, FP16, columns, some, scratch + PACKED_B);
    }
    multiplyPanels(rows, columns, some, scratch);
  }
}

/**
 * Rounds the sums of a block and writes them to the result.
 *
 * @param out the block's first element in the result; `outRow`: elements from one row to the next
 */
export function finish(
  scratch: usize,
  rows: i32,
  columns: i32,
  out: usize,
  outRow: i32,
  dtype: i32,
): void {
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const sum = load<f32>(sumAt(scratch, row, column));
      const at = <usize>row * outRow + column;
      if (dtype === FP32) store<f32>(out + at * 4, sum);
      else if (dtype === BF16) store<u16>(out + at * 2, toBf16(sum));
      else store<u16>(out + at * 2, toFp16(sum));
    }
  }
}

function sumAt(scratch: usize, row: i32, column: i32): usize {
  const tile = (row / TILE_ROWS) * (BLOCK_COLUMNS / TILE_COLUMNS) + column / TILE_COLUMNS;
  const within = (row % TILE_ROWS) * TILE_COLUMNS + (column % TILE_COLUMNS);
  return scratch + SUMS + <usize>tile * TILE_BYTES + <usize>within * 4;
}

/** Panels of 4 rows, depth by depth: what a tile reads lies in the order in which it is read. */
function packA<T>(
  a: usize,
  rowStep: i32,
  depthStep: i32,
  dtype: i32,
  rows: i32,
  depth: i32,
  to: usize,
): void {
  for (let panel = 0; panel < rows; panel += TILE_ROWS) {
    const first = a + <usize>panel * rowStep * sizeof<T>();
    const whole = rows - panel >= TILE_ROWS;
    for (let k = 0; k < depth; k++) {
      const from = first + <usize>k * depthStep * sizeof<T>();
      for (let row = 0; row < TILE_ROWS; row++) {
        const there = whole || panel + row < rows;
        const value = there ? widen(from + <usize>row * rowStep * sizeof<T>(), dtype) : 0;
        store<f32>(to + <usize>row * 4, value);
      }
      to += TILE_ROWS * 4;
    }
  }
}

/** Panels of 8 columns, depth by depth. */
function packB<T>(
  b: usize,
  depthStep: i32,
  columnStep: i32,
  dtype: i32,
  columns: i32,
  depth: i32,
  to: usize,
): void {
  for (let panel = 0; panel < columns; panel += TILE_COLUMNS) {
    const first = b + <usize>panel * columnStep * sizeof<T>();
    const whole = columns - panel >= TILE_COLUMNS;
    if (whole && columnStep === 1) {
      for (let k = 0; k < depth; k++) {
        widenEight(first + <usize>k * depthStep * sizeof<T>(), dtype, to);
        to += TILE_COLUMNS * 4;
      }
      continue;
    }
    for (let k = 0; k < depth; k++) {
      const from = first + <usize>k * depthStep * sizeof<T>();
      for (let column = 0; column < TILE_COLUMNS; column++) {
        const there = whole || panel + column < columns;
        const value = there ? widen(from + <usize>column * columnStep * sizeof<T>(), dtype) : 0;
        store<f32>(to + <usize>column * 4, value);
      }
      to += TILE_COLUMNS * 4;
    }
  }
}

function widen(from: usize, dtype: i32): f32 {
  if (dtype === FP32) return load<f32>(from);
  const bits = <u32>load<u16>(from);
  return dtype === BF16 ? reinterpret<f32>(bits << 16) : fromFp16(bits);
}

/** Eight neighbours at once. */
function widenEight(from: usize, dtype: i32, to: usize): void {
  if (dtype === FP32) {
    v128.store(to, v128.load(from));
    v128.store(to, v128.load(from, 16), 16);
    return;
  }
  const low = v128.load_ext<u16>(from);
  const high = v128.load_ext<u16>(from, 8);
  if (dtype === BF16) {
    v128.store(to, i32x4.shl(low, 16));
    v128.store(to, i32x4.shl(high, 16), 16);
  } else {
    v128.store(to, fromFp16Four(low));
    v128.store(to, fromFp16Four(high), 16);
  }
}

/** Scaling by 2^112 moves the exponent's bias from 15 to 127, and makes subnormals normal. */
function fromFp16(bits: u32): f32 {
  const magnitude = bits & 0x7fff;
  const sign = (bits & 0x8000) << 16;
  const scaled = reinterpret<u32>(reinterpret<f32>(magnitude << 13) * reinterpret<f32>(0x77800000));
  return reinterpret<f32>(sign | (magnitude >= 0x7c00 ? scaled | 0x7f800000 : scaled));
}

function fromFp16Four(bits: v128): v128 {
  const magnitude = v128.and(bits, i32x4.splat(0x7fff));
  const sign = i32x4.shl(v128.and(bits, i32x4.splat(0x8000)), 16);
  const scaled = f32x4.mul(i32x4.shl(magnitude, 13), i32x4.splat(0x77800000));
  const special = i32x4.gt_s(magnitude, i32x4.splat(0x7bff));
  return v128.or(sign, v128.or(scaled, v128.and(special, i32x4.splat(0x7f800000))));
}

function toBf16(value: f32): u16 {
  const bits = reinterpret<u32>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return <u16>((bits >> 16) | 0x40);
  return <u16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/** To nearest, ties to even; adding 0.5 lets fp32 itself round what becomes subnormal. */
function toFp16(value: f32): u16 {
  const bits = reinterpret<u32>(value);
  const sign = (bits >> 16) & 0x8000;
  const magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return <u16>(sign | 0x7e00);
  if (magnitude >= 0x47800000) return <u16>(sign | 0x7c00); // 65536 and more
  if (magnitude < 0x38800000) {
    const shifted = reinterpret<u32>(reinterpret<f32>(magnitude) + <f32>0.5);
    return <u16>(sign | (shifted - 0x3f000000));
  }
  return <u16>(sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13));
}

function multiplyPanels(rows: i32, columns: i32, depth: i32, scratch: usize): void {
  const aPanelBytes = <usize>depth * TILE_ROWS * 4;
  const bPanelBytes = <usize>depth * TILE_COLUMNS * 4;
  for (let row = 0; row < rows; row += TILE_ROWS) {
    const a = scratch + PACKED_A + <usize>(row / TILE_ROWS) * aPanelBytes;
    for (let column = 0; column < columns; column += TILE_COLUMNS) {
      const b = scratch + PACKED_B + <usize>(column / TILE_COLUMNS) * bPanelBytes;
      multiplyTile(a, b, depth, sumAt(scratch, row, column));
    }
  }
}

/** A 4x8 tile of sums, kept in eight registers over the whole depth. */
function multiplyTile(a: usize, b: usize, depth: i32, sums: usize): void {
  let s00 = v128.load(sums, 0);
  let s01 = v128.load(sums, 16);
  let s10 = v128.load(sums, 32);
  let s11 = v128.load(sums, 48);
  let s20 = v128.load(sums, 64);
  let s21 = v128.load(sums, 80);
  let s30 = v128.load(sums, 96);
  let s31 = v128.load(sums, 112);
  const end = a + ((<usize>depth) << 4);
  while (a < end) {
    const b0 = v128.load(b, 0);
    const b1 = v128.load(b, 16);
    let row = v128.load_splat<u32>(a, 0);
    s00 = f32x4.add(s00, f32x4.mul(row, b0));
    s01 = f32x4.add(s01, f32x4.mul(row, b1));
    row = v128.load_splat<u32>(a, 4);
    s10 = f32x4.add(s10, f32x4.mul(row, b0));
    s11 = f32x4.add(s11, f32x4.mul(row, b1));
    row = v128.load_splat<u32>(a, 8);
    s20 = f32x4.add(s20, f32x4.mul(row, b0));
    s21 = f32x4.add(s21, f32x4.mul(row, b1));
    row = v128.load_splat<u32>(a, 12);
    s30 = f32x4.add(s30, f32x4.mul(row, b0));
    s31 = f32x4.add(s31, f32x4.mul(row, b1));
    a += 16;
    b += 32;
  }
  v128.store(sums, s00, 0);
  v128.store(sums, s01, 16);
  v128.store(sums, s10, 32);
  v128.store(sums, s11, 48);
  v128.store(sums, s20, 64);
  v128.store(sums, s21, 80);
  v128.store(sums, s30, 96);
  v128.store(sums, s31, 112);
}
