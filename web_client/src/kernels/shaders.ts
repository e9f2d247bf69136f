/** The WGSL of the GPU kernel. */

import { DType } from "./kernel";

/** Rows and columns of the result that one workgroup computes. */
export const TILE = 64;
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

/**
 * sums (+)= op(A) op(B): a workgroup takes a 64x64 tile of the sums, 16 columns of op(A) and rows
 * of op(B) at a time through workgroup memory; an invocation keeps 4x4 sums in registers.
 *
 * @param dtype of the operands
 * @param halves whether the GPU has 16-bit floats; products and sums are fp32 all the same
 */
export function multiplyShader(dtype: DType, halves: boolean): string {
  return /* wgsl */ `
${dtype === DType.FP16 && halves ? "enable f16;" : ""}
${PARAMETERS}
@group(0) @binding(0) var<uniform> p: Parameters;
${elements(dtype, halves)}
@group(0) @binding(3) var<storage, read_write> sums: array<f32>;

const TILE = ${TILE}u;
const STEP = 16u;
var<workgroup> left: array<Element, TILE * STEP>;   // by depth, then row
var<workgroup> right: array<Element, TILE * STEP>;  // by depth, then column

@compute @workgroup_size(16, 16)
fn main(
  @builtin(local_invocation_id) local: vec3u,
  @builtin(local_invocation_index) index: u32,
  @builtin(workgroup_id) group: vec3u,
) {
  let firstRow = group.y * TILE;
  let firstColumn = group.x * TILE;
  var tile: array<vec4f, 4>;
  for (var start = 0u; start < p.depth; start += STEP) {
    for (var i = index; i < TILE * STEP; i += 256u) {
      // Neighbouring invocations read neighbouring elements, whichever way the operand lies.
      let aAlong = select(vec2u(i % TILE, i / TILE), vec2u(i / STEP, i % STEP), p.aDepth == 1u);
      let row = firstRow + aAlong.x;
      let aDepth = start + aAlong.y;
      var x = Element(0);
      if (row < p.rows && aDepth < p.depth) { x = readA(row * p.aRow + aDepth * p.aDepth); }
      left[aAlong.y * TILE + aAlong.x] = x;
      let bAlong = select(vec2u(i % TILE, i / TILE), vec2u(i / STEP, i % STEP), p.bDepth == 1u);
      let column = firstColumn + bAlong.x;
      let bDepth = start + bAlong.y;
      var y = Element(0);
      if (column < p.columns && bDepth < p.depth) {
        y = readB(bDepth * p.bDepth + column * p.bColumn);
      }
      right[bAlong.y * TILE + bAlong.x] = y;
    }
    workgroupBarrier();
    for (var k = 0u; k < STEP; k++) {
      let at = k * TILE;
      let y = vec4f(
        f32(right[at + local.x]), f32(right[at + local.x + 16]),
        f32(right[at + local.x + 32]), f32(right[at + local.x + 48]),
      );
      for (var i = 0u; i < 4u; i++) {
        tile[i] += f32(left[at + local.y + 16u * i]) * y;
      }
    }
    workgroupBarrier();
  }
  for (var i = 0u; i < 4u; i++) {
    let row = firstRow + local.y + 16u * i;
    for (var j = 0u; j < 4u; j++) {
      let column = firstColumn + local.x + 16u * j;
      if (row < p.rows && column < p.columns) {
        let at = row * p.columns + column;
        if (p.add == 1u) { sums[at] += tile[i][j]; } else { sums[at] = tile[i][j]; }
      }
    }
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
