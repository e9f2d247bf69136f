/**
 * How exactly a browser computes graphs: small graphs of our own, compared with 64-bit arithmetic.
 * What computes in fewer bits than fp32's looks right, and trains another model.
 * `cleave/machine/graph_choice.py` tries more; each graph here has something of what layers do.
 */

import { GraphError } from "./errors";
import { free, type OpenGraph, read, type Value } from "./graph_session";
import { written } from "./graph_writer";

/** Errors from this on are no rounding of fp32, as in Python. */
export const LARGEST_ERROR = 2e-5;

const DEPTH = 4096; // of sums: as wide as layers are

interface Trial {
  /** What it tries, for people. */
  readonly name: string;
  readonly model: Uint8Array;
  readonly given: { readonly [name: string]: Value };
  /** Outputs in 64 bits. */
  readonly wanted: { readonly [name: string]: Float64Array };
}

/** The worst of all errors, relative to the largest element, and what had it. */
export interface Accuracy {
  readonly error: number;
  readonly trial: string;
}

/**
 * Try all graphs.
 *
 * @throws GraphError where an error is no rounding of fp32; what `open` throws passes through
 */
export async function selfTest(open: OpenGraph): Promise<Accuracy> {
  let worst: Accuracy = { error: 0, trial: "" };
  for (const trial of trials()) {
    const error = await errorOf(trial, open);
    if (error >= worst.error) worst = { error, trial: trial.name };
  }
  if (worst.error < LARGEST_ERROR) return worst;
  throw new GraphError(
    `this browser does not compute graphs exactly: in its self-test it is off by ` +
      `${worst.error.toExponential(0)} (${worst.trial}), and fp32 by less than ${LARGEST_ERROR}`,
  );
}

async function errorOf({ model, given, wanted }: Trial, open: OpenGraph): Promise<number> {
  const session = await open(model);
  try {
    const found = await session.run(new Map(Object.entries(given)), Object.keys(wanted));
    let worst = 0;
    for (const [name, right] of Object.entries(wanted)) {
      const made = found.get(name);
      if (!made) return Infinity;
      worst = Math.max(worst, errorIn((await read(made)).data, right));
      free(made);
    }
    return worst;
  } finally {
    await session.close();
  }
}

function errorIn(data: Value["data"], right: Float64Array): number {
  if (!(data instanceof Float32Array) || data.length !== right.length) return Infinity;
  const largest = right.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  let off = 0;
  for (const [n, value] of right.entries()) off = Math.max(off, Math.abs(data[n]! - value));
  return Number.isNaN(off) ? Infinity : off / largest;
}

function* trials(): Generator<Trial> {
  const random = normal();
  yield products(array([8, DEPTH], random), array([DEPTH, 32], random));
  yield attention(array([16, 64], random), array([64, 16], random), array([16, 32], random));
  yield curves(array([1, 2001], () => 0).data.map((_, n) => (n - 1000) / 100));
  yield normalization(array([8, 768], random), array([768], random), array([768], random));
}

/** Deep sums of products of either sign, in which rounded factors do not cancel. */
function products(x: Value, w: Value): Trial {
  return {
    name: "deep products",
    model: written(
      [{ operation: "MatMul", inputs: ["x", "w"], outputs: ["y"] }],
      { x: ["batch", DEPTH], w: w.shape },
      { y: ["batch", 32] },
    ),
    given: { x, w },
    wanted: { y: multiplied(wide(x), wide(w), DEPTH) },
  };
}

/** A softmax between products, of scores that are far from each other. */
function attention(q: Value, k: Value, v: Value): Trial {
  const [depth, keys] = [k.shape[0]!, k.shape[1]!];
  const weights = multiplied(wide(q), wide(k), depth);
  for (let row = 0; row < weights.length; row += keys) {
    const scores = weights.subarray(row, row + keys);
    const most = Math.max(...scores);
    const sum = scores.reduce((total, score) => total + Math.exp(score - most), 0);
    scores.set(scores.map((score) => Math.exp(score - most) / sum));
  }
  return {
    name: "softmax",
    model: written(
      [
        { operation: "MatMul", inputs: ["q", "k"], outputs: ["scores"] },
        {
          operation: "Softmax",
          inputs: ["scores"],
          outputs: ["weights"],
          attributes: { axis: -1 },
        },
        { operation: "MatMul", inputs: ["weights", "v"], outputs: ["y"] },
      ],
      { q: ["batch", depth], k: k.shape, v: v.shape },
      { y: ["batch", v.shape[1]!] },
    ),
    given: { q, k, v },
    wanted: { y: multiplied(weights, wide(v), keys) },
  };
}

/** The curves of activations. */
function curves(data: Float32Array): Trial {
  const of = (operation: string) => ({ operation, inputs: ["x"], outputs: [operation] });
  const shape = ["batch", data.length];
  const x = Float64Array.from(data);
  return {
    name: "curves",
    model: written(
      [of("Exp"), of("Sigmoid"), of("Tanh")],
      { x: shape },
      { Exp: shape, Sigmoid: shape, Tanh: shape },
    ),
    given: { x: { type: "float32", shape: [1, data.length], data } },
    wanted: {
      Exp: x.map(Math.exp),
      Sigmoid: x.map((value) => 1 / (1 + Math.exp(-value))),
      Tanh: x.map(Math.tanh),
    },
  };
}

function normalization(x: Value, scale: Value, shift: Value): Trial {
  const width = scale.data.length;
  const [factor, term, y] = [wide(scale), wide(shift), wide(x)];
  for (let row = 0; row < y.length; row += width) {
    const values = y.subarray(row, row + width);
    const mean = values.reduce((sum, value) => sum + value, 0) / width;
    const squares = values.reduce((sum, value) => sum + (value - mean) ** 2, 0);
    const root = Math.sqrt(squares / width + 1e-5);
    values.set(values.map((value, n) => ((value - mean) / root) * factor[n]! + term[n]!));
  }
  return {
    name: "normalization",
    model: written(
      [
        {
          operation: "LayerNormalization",
          inputs: ["x", "scale", "shift"],
          outputs: ["y"],
        },
      ],
      { x: ["batch", width], scale: [width], shift: [width] },
      { y: ["batch", width] },
    ),
    given: { x, scale, shift },
    wanted: { y },
  };
}

/** The product of matrices that lie row by row; `depth` is what they have in common. */
function multiplied(a: Float64Array, b: Float64Array, depth: number): Float64Array {
  const columns = b.length / depth;
  const product = new Float64Array((a.length / depth) * columns);
  for (let n = 0; n < product.length; n++) {
    const row = Math.floor(n / columns) * depth;
    for (let k = 0; k < depth; k++) product[n]! += a[row + k]! * b[k * columns + (n % columns)]!;
  }
  return product;
}

function array(shape: readonly number[], next: () => number): Value & { data: Float32Array } {
  const items = shape.reduce((product, size) => product * size, 1);
  return { type: "float32", shape, data: Float32Array.from({ length: items }, next) };
}

function wide({ data }: Value): Float64Array {
  return Float64Array.from(data as Float32Array);
}

/** Numbers of a normal distribution, the same at every call. */
function normal(): () => number {
  let state = 20;
  const uniform = () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return (state + 0.5) / 2 ** 32;
  };
  return () => Math.sqrt(-2 * Math.log(uniform())) * Math.cos(2 * Math.PI * uniform());
}
