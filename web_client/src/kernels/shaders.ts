/** The WGSL of the GPU kernel. */

import { DType } from "./kernel";

/** The sides of a workgroup, in invocations. */
export const SIDE = 16;
/** Rows or columns of the result that one invocation computes: few where the result is thin. */
export type Each = 1 | 4;
/** Up to so many elements, each has a workgroup of its own, which shares out the depth. */
export const FEW = 64;
/** Invocations of a workgroup of the rounding shader, each of which writes one word. */
export const ROUND_WORKGROUP = 256;

const PARAMETERS = /* wgsl */ `
struct Parameters {
  rows: u32, columns: u32, depth: u32,
  aRow: u32, aDepth: u32, bDepth: u32, bColumn: u32,  // elements from one to the next
  add: u32,                                           // to the sums that are there
}
`;

/** How an element is read, and as what it is kept in workgroup memory: always exactly. */
function elements(dtype: DType, halves: boolean): string {
  if (dtype === DType.FP16 && halves) {
    return /* wgsl */ `
@group(0) @binding(1) var<storage, read> a: array<f16>;
@group(0) @binding(2) var<storage, read> b: array<f16>;
alias Element = f16;
fn readA(i: u32) -> Element { return a[i]; }
fn readB(i: u32) -> Element { return b[i]; }
`;
  }
  const value = {
    [DType.FP32]: "bitcast<f32>(WORDS[i])",
    [DType.BF16]: "bitcast<f32>(select(WORDS[i / 2] << 16, WORDS[i / 2] & 0xffff0000, i % 2 == 1))",
    [DType.FP16]: "unpack2x16float(WORDS[i / 2])[i % 2]",
  }[dtype];
  return /* wgsl */ `
@group(0) @binding(1) var<storage, read> a: array<u32>;
@group(0) @binding(2) var<storage, read> b: array<u32>;
alias Element = f32;
fn readA(i: u32) -> Element { return ${value.replaceAll("WORDS", "a")}; }
fn readB(i: u32) -> Element { return ${value.replaceAll("WORDS", "b")}; }
`;
}

const BINDINGS = (dtype: DType, halves: boolean) => /* wgsl */ `
${dtype === DType.FP16 && halves ? "enable f16;" : ""}
${PARAMETERS}
@group(0) @binding(0) var<uniform> p: Parameters;
${elements(dtype, halves)}
@group(0) @binding(3) var<storage, read_write> sums: array<f32>;
`;

/**
 * sums (+)= op(A) op(B): a workgroup takes a tile of the sums, 16 columns of op(A) and rows of op(B)
 * at a time through workgroup memory; an invocation keeps its sums in registers.
 *
 * @param dtype of the operands
 * @param halves whether the GPU has 16-bit floats; products and sums are fp32 all the same
 * @param rowsEach, columnsEach what an invocation computes; a tile has 16 times that
 */
export function multiplyShader(
  dtype: DType,
  halves: boolean,
  rowsEach: Each,
  columnsEach: Each,
): string {
  const vector = columnsEach === 4 ? "vec4f" : "f32";
  const right = Array.from(
    { length: columnsEach },
    (_, j) => `f32(right[k * COLUMNS + local.x + ${SIDE * j}u])`,
  ).join(", ");
  const element = columnsEach === 4 ? "tile[i][j]" : "tile[i]";
  return /* wgsl */ `
${BINDINGS(dtype, halves)}
const ROWS = ${SIDE * rowsEach}u;
const COLUMNS = ${SIDE * columnsEach}u;
const STEP = 16u;
var<workgroup> left: array<Element, ROWS * STEP>;      // by depth, then row
var<workgroup> right: array<Element, COLUMNS * STEP>;  // by depth, then column

/** Row or column, and depth, of the i-th element to fetch: neighbours are fetched by neighbours. */
fn place(i: u32, side: u32, depthStep: u32) -> vec2u {
  if (depthStep == 1) { return vec2u(i / STEP, i % STEP); }
  return vec2u(i % side, i / side);
}

@compute @workgroup_size(${SIDE}, ${SIDE})
fn main(
  @builtin(local_invocation_id) local: vec3u,
  @builtin(local_invocation_index) index: u32,
  @builtin(workgroup_id) group: vec3u,
) {
  let firstRow = group.y * ROWS;
  let firstColumn = group.x * COLUMNS;
  var tile: array<${vector}, ${rowsEach}>;
  for (var start = 0u; start < p.depth; start += STEP) {
    for (var i = index; i < ROWS * STEP; i += ${SIDE * SIDE}u) {
      let at = place(i, ROWS, p.aDepth);
      let row = firstRow + at.x;
      let depth = start + at.y;
      var x = Element(0);
      if (row < p.rows && depth < p.depth) { x = readA(row * p.aRow + depth * p.aDepth); }
      left[at.y * ROWS + at.x] = x;
    }
    for (var i = index; i < COLUMNS * STEP; i += ${SIDE * SIDE}u) {
      let at = place(i, COLUMNS, p.bDepth);
      let column = firstColumn + at.x;
      let depth = start + at.y;
      var y = Element(0);
      if (column < p.columns && depth < p.depth) {
        y = readB(depth * p.bDepth + column * p.bColumn);
      }
      right[at.y * COLUMNS + at.x] = y;
    }
    workgroupBarrier();
    for (var k = 0u; k < STEP; k++) {
      let y = ${vector}(${right});
      for (var i = 0u; i < ${rowsEach}u; i++) {
        tile[i] += f32(left[k * ROWS + local.y + ${SIDE}u * i]) * y;
      }
    }
    workgroupBarrier();
  }
  for (var i = 0u; i < ${rowsEach}u; i++) {
    let row = firstRow + local.y + ${SIDE}u * i;
    for (var j = 0u; j < ${columnsEach}u; j++) {
      let column = firstColumn + local.x + ${SIDE}u * j;
      if (row < p.rows && column < p.columns) {
        let at = row * p.columns + column;
        if (p.add == 1u) { sums[at] += ${element}; } else { sums[at] = ${element}; }
      }
    }
  }
}
`;
}

/** The same for a result of few elements, whose depth is what there is to share out. */
export function dotShader(dtype: DType, halves: boolean): string {
  return /* wgsl */ `
${BINDINGS(dtype, halves)}
const THREADS = ${SIDE * SIDE}u;
var<workgroup> partial: array<f32, THREADS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) index: u32, @builtin(workgroup_id) group: vec3u) {
  let row = group.x / p.columns;
  let column = group.x % p.columns;
  var sum = 0.0;
  for (var k = index; k < p.depth; k += THREADS) {
    let x = f32(readA(row * p.aRow + k * p.aDepth));
    sum += x * f32(readB(k * p.bDepth + column * p.bColumn));
  }
  partial[index] = sum;
  for (var half = THREADS / 2; half > 0; half /= 2) {
    workgroupBarrier();
    if (index < half) { partial[index] += partial[index + half]; }
  }
  if (index == 0) {
    if (p.add == 1u) { sums[group.x] += partial[0]; } else { sums[group.x] = partial[0]; }
  }
}
`;
}

/** The sums as bf16 or fp16, two in a word, each to the nearest, ties to even. */
export function roundShader(dtype: DType.BF16 | DType.FP16): string {
  const round =
    dtype === DType.BF16
      ? /* wgsl */ `
fn rounded(bits: u32) -> u32 {
  if ((bits & 0x7fffffff) > 0x7f800000) { return (bits >> 16) | 0x40; }
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
`
      : // In integers: WGSL leaves it open how its own conversions round.
        /* wgsl */ `
fn rounded(bits: u32) -> u32 {
  let sign = (bits >> 16) & 0x8000;
  let magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) { return sign | 0x7e00; }
  if (magnitude >= 0x47800000) { return sign | 0x7c00; }
  if (magnitude >= 0x38800000) {
    return sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13);
  }
  let shift = 126 - (magnitude >> 23);  // in units of the smallest fp16
  if (shift > 24) { return sign; }
  let fraction = (magnitude & 0x7fffff) | 0x800000;
  let whole = fraction >> shift;
  let rest = fraction & ((1u << shift) - 1);
  let half = 1u << (shift - 1);
  return sign | (whole + select(0u, 1u, rest > half || (rest == half && (whole & 1) == 1)));
}
`;
  return /* wgsl */ `
@group(0) @binding(0) var<storage, read> sums: array<f32>;
@group(0) @binding(1) var<storage, read_write> words: array<u32>;
${round}
@compute @workgroup_size(${ROUND_WORKGROUP})
fn main(
  @builtin(global_invocation_id) id: vec3u,
  @builtin(num_workgroups) groups: vec3u,
) {
  let word = id.y * groups.x * ${ROUND_WORKGROUP}u + id.x;
  if (word >= arrayLength(&words) || 2 * word >= arrayLength(&sums)) { return; }
  let low = rounded(bitcast<u32>(sums[2 * word])) & 0xffff;
  var high = 0u;
  if (2 * word + 1 < arrayLength(&sums)) {
    high = rounded(bitcast<u32>(sums[2 * word + 1])) & 0xffff;
  }
  words[word] = low | (high << 16);
}
`;
}
