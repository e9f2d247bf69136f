/**
 * The operations that graphs have, and the sizes of what each computes. docs/protocol.md
 * (*Operations*) has the list; `cleave/machine/graph_operations.py` is the same in Python.
 */

import {
  BOOL,
  FLOAT32,
  followed,
  INT32,
  INT64,
  LARGEST_NUMBER,
  MOST_VALUES,
  type Operation,
  product,
  Refusal,
  type Shape,
  Sized,
  UnboundedError,
  type Values,
} from "./graph_arrays";

/** What is known of each input; null for one that is left out. */
export type Given = readonly (Sized | null)[];

/** What an operation computes, and the memory that it needs meanwhile beside that. */
export interface Made {
  readonly outputs: readonly Sized[];
  readonly working_bytes: number;
}

type Rule = (operation: Operation, given: Given) => Sized | Made;
type Calculate = (...numbers: number[]) => number | null;

/**
 * What an operation computes, of any but those that hold graphs.
 *
 * @throws UnboundedError where that does not follow from its inputs, or there is no such operation
 */
export function madeBy(operation: Operation, given: Given): Made {
  const rule = RULES.get(operation.name);
  if (!rule) {
    throw new UnboundedError(
      Refusal.OPERATION,
      `graphs have no operation ${operation.name.slice(0, 60)}`,
    );
  }
  const found = rule(operation, given);
  return found instanceof Sized ? { outputs: [found], working_bytes: 0 } : found;
}

// --- parts of rules ------------------------------------------------------------------------------

function input(operation: Operation, given: Given, number = 0): Sized {
  const found = given[number];
  if (!found) throw operation.refused(`it has no input ${number}`);
  return found;
}

/** The elements of an input that must be known. */
function valuesOf(operation: Operation, given: Given, number: number): readonly number[] {
  const { values } = input(operation, given, number);
  if (!values) {
    throw operation.refused(`its input ${number} says a size and is not known before the run`);
  }
  return values;
}

function optionalValues(operation: Operation, given: Given, number: number): Values {
  return given[number] ? valuesOf(operation, given, number) : null;
}

function axisOf(operation: Operation, axis: number, rank: number): number {
  if (axis < -rank || axis >= rank) throw operation.refused(`there is no axis ${axis} of ${rank}`);
  return axis < 0 ? axis + rank : axis;
}

function axesOf(operation: Operation, axes: readonly number[], rank: number): number[] {
  const found = axes.map((axis) => axisOf(operation, axis, rank));
  if (new Set(found).size < found.length) {
    throw operation.refused(`an axis stands twice in [${axes.join(", ")}]`);
  }
  return found;
}

const upTo = (count: number): number[] => Array.from({ length: count }, (_, n) => n);

function broadcast(operation: Operation, shapes: readonly Shape[]): number[] {
  const rank = shapes.reduce((most, shape) => Math.max(most, shape.length), 0);
  const found: number[] = Array(rank).fill(1);
  for (const shape of shapes) {
    for (const [n, size] of shape.entries()) {
      const at = rank - shape.length + n;
      if (found[at] === 1) found[at] = size;
      else if (size !== 1 && size !== found[at]) {
        throw operation.refused("the shapes of its inputs do not fit");
      }
    }
  }
  return found;
}

function isWithin(type: number, value: number | null): value is number {
  return value !== null && Math.abs(value) < (type === INT32 ? 2 ** 31 : LARGEST_NUMBER);
}

/** What is computed from elements at the same place of arrays, broadcast together. */
function oneByOne(
  operation: Operation,
  arrays: readonly Sized[],
  type: number,
  each: Calculate | null,
): Sized {
  const shape = broadcast(
    operation,
    arrays.map((array) => array.shape),
  );
  const count = product(shape);
  const rows = arrays.flatMap(({ values }) => (values ? [values] : []));
  if (!each || shape.length > 1 || count > MOST_VALUES || rows.length < arrays.length) {
    return new Sized(shape, type);
  }
  const values: number[] = [];
  for (let n = 0; n < count; n++) {
    const found = each(...rows.map((row) => row[row.length === 1 ? 0 : n]!));
    if (!isWithin(type, found)) return new Sized(shape, type);
    values.push(found);
  }
  return followed(shape, type, values);
}

/** A calculation that has no result where a number is too large to be told apart. */
function exact(calculate: Calculate): Calculate {
  return (...numbers) =>
    numbers.some((number) => Math.abs(number) >= LARGEST_NUMBER) ? null : calculate(...numbers);
}

function without(shape: Shape, axes: readonly number[], keep: number): number[] {
  return shape.flatMap((size, at) => (!axes.includes(at) ? [size] : keep ? [1] : []));
}

// --- rules ---------------------------------------------------------------------------------------

const same: Rule = (operation, given) => {
  const first = input(operation, given);
  return new Sized(first.shape, first.type);
};

const truthOf: Rule = (operation, given) => new Sized(input(operation, given).shape, BOOL);

function inputs(operation: Operation, given: Given, count: number): Sized[] {
  return upTo(count).map((number) => input(operation, given, number));
}

const arithmetic =
  (calculate?: Calculate): Rule =>
  (operation, given) => {
    const arrays = inputs(operation, given, Math.max(given.length, 1));
    const each = calculate && arrays.length === 2 ? exact(calculate) : null;
    const found = oneByOne(operation, arrays, arrays[0]!.type, each);
    return { outputs: [found], working_bytes: arrays.length > 2 ? found.bytes : 0 };
  };

const comparison =
  (calculate?: (a: number, b: number) => boolean): Rule =>
  (operation, given) => {
    const each = calculate ? exact((a, b) => Number(calculate(a!, b!))) : null;
    return oneByOne(operation, inputs(operation, given, 2), BOOL, each);
  };

const where: Rule = (operation, given) => {
  const arrays = inputs(operation, given, 3);
  const each = exact((c, a, b) => (c ? a! : b!));
  const found = oneByOne(operation, arrays, arrays[1]!.type, each);
  return { outputs: [found], working_bytes: 2 * found.bytes }; // each of both is selected apart
};

const cast: Rule = (operation, given) => {
  const first = input(operation, given);
  const to = operation.integer("to", 0);
  const each: Calculate = to === BOOL ? (a) => Number(a !== 0) : exact((a) => a!);
  return oneByOne(operation, [first], to, each);
};

const softmax: Rule = (operation, given) => {
  const first = input(operation, given);
  const rank = Math.max(first.shape.length, 1);
  const last = axisOf(operation, operation.integer("axis", -1), rank) === rank - 1;
  return {
    outputs: [new Sized(first.shape, first.type)],
    working_bytes: last ? 0 : 2 * first.bytes,
  };
};

const layerNormalization: Rule = (operation, given) => {
  const { shape, type } = input(operation, given);
  const axis = axisOf(operation, operation.integer("axis", -1), shape.length);
  const rest = new Sized(
    shape.map((size, at) => (at < axis ? size : 1)),
    FLOAT32,
  );
  return { outputs: [new Sized(shape, type), rest, rest], working_bytes: 0 };
};

const reduced: Rule = (operation, given) => {
  const { shape, type, values } = input(operation, given);
  let axes = optionalValues(operation, given, 1);
  if (!axes || axes.length === 0) {
    if (operation.integer("noop_with_empty_axes", 0)) return new Sized(shape, type);
    axes = upTo(shape.length);
  }
  const gone = axesOf(operation, axes, shape.length);
  const rest = without(shape, gone, operation.integer("keepdims", 1));
  if (operation.name !== "ReduceProd" || !values || gone.length === 0) return new Sized(rest, type);
  let all = 1;
  for (const value of values) {
    all = Math.min(all * Math.min(Math.abs(value), LARGEST_NUMBER), LARGEST_NUMBER);
  }
  const known = !values.some((value) => value < 0) && isWithin(type, all);
  return followed(rest, type, known ? [all] : null);
};

const arg: Rule = (operation, given) => {
  const { shape } = input(operation, given);
  const axis = axisOf(operation, operation.integer("axis", 0), shape.length);
  return new Sized(without(shape, [axis], operation.integer("keepdims", 1)), INT64);
};

const matmul: Rule = (operation, given) => {
  const [a, b] = inputs(operation, given, 2) as [Sized, Sized];
  const unfit = `shapes [${a.shape.join(", ")}] and [${b.shape.join(", ")}] do not fit`;
  if (a.shape.length === 0 || b.shape.length === 0) {
    throw operation.refused("an input has no dimension");
  }
  const left = a.shape.length > 1 ? a.shape : [1, ...a.shape];
  const right = b.shape.length > 1 ? b.shape : [...b.shape, 1];
  if (left.at(-1) !== right.at(-2)) throw operation.refused(unfit);
  const batch = broadcast(operation, [left.slice(0, -2), right.slice(0, -2)]);
  const rows = a.shape.length > 1 ? [left.at(-2)!] : [];
  const columns = b.shape.length > 1 ? [right.at(-1)!] : [];
  return new Sized([...batch, ...rows, ...columns], a.type);
};

const gemm: Rule = (operation, given) => {
  const [a, b] = inputs(operation, given, 2) as [Sized, Sized];
  if (a.shape.length !== 2 || b.shape.length !== 2)
    throw operation.refused("an input is no matrix");
  const [rows, depth] = operation.integer("transA", 0) ? [...a.shape].reverse() : a.shape;
  const [other, columns] = operation.integer("transB", 0) ? [...b.shape].reverse() : b.shape;
  if (depth !== other) {
    throw operation.refused(
      `shapes [${a.shape.join(", ")}] and [${b.shape.join(", ")}] do not fit`,
    );
  }
  return new Sized([rows!, columns!], a.type);
};

const conv: Rule = (operation, given) => {
  const [x, w] = inputs(operation, given, 2) as [Sized, Sized];
  const rank = x.shape.length - 2;
  const nonEmpty = (name: string, otherwise: number[]) => {
    const found = operation.integers(name);
    return found && found.length > 0 ? found : otherwise;
  };
  const ones = upTo(Math.max(rank, 0)).map(() => 1);
  const strides = nonEmpty("strides", ones);
  const dilations = nonEmpty("dilations", ones);
  const pads = nonEmpty("pads", [...ones, ...ones].fill(0));
  const auto = operation.attributes.get("auto_pad");
  const sizes = [w.shape.length - 2, strides.length, dilations.length, pads.length - rank];
  const fits =
    rank >= 1 &&
    sizes.every((size) => size === rank) &&
    (!auto || auto.text === "NOTSET") &&
    Math.min(...strides, ...dilations) >= 1 &&
    Math.min(...pads) >= 0;
  if (!fits) throw operation.refused("its attributes do not fit its inputs");
  const spatial = x.shape.slice(2).map((size, at) => {
    const window = dilations[at]! * (w.shape[2 + at]! - 1) + 1;
    const room = size + pads[at]! + pads[rank + at]! - window;
    if (room < 0 || w.shape[2 + at]! < 1) {
      throw operation.refused(
        `shapes [${x.shape.join(", ")}] and [${w.shape.join(", ")}] do not fit`,
      );
    }
    return quotient(room, strides[at]!) + 1;
  });
  const found = new Sized([x.shape[0]!, w.shape[0]!, ...spatial], x.type);
  const columns = new Sized([...w.shape.slice(1), ...spatial], x.type);
  return { outputs: [found], working_bytes: columns.bytes + x.bytes + found.bytes };
};

/** A whole quotient, exact up to 2^53. */
function quotient(a: number, b: number): number {
  return (a - (a % b)) / b;
}

const shapeOf: Rule = (operation, given) => {
  const { shape } = input(operation, given);
  const rank = shape.length;
  const at = (end: number) => Math.min(Math.max(end < 0 ? end + rank : end, 0), rank);
  const found = shape.slice(at(operation.integer("start", 0)), at(operation.integer("end", rank)));
  return followed([found.length], INT64, found);
};

const sizeOf: Rule = (operation, given) => followed([], INT64, [input(operation, given).elements]);

const reshape: Rule = (operation, given) => {
  const first = input(operation, given);
  const wanted = [...valuesOf(operation, given, 1)];
  if (!operation.integer("allowzero", 0)) {
    for (const [at, size] of wanted.entries()) {
      if (size !== 0) continue;
      if (at >= first.shape.length) {
        throw operation.refused(`shape [${first.shape.join(", ")}] has no axis ${at}`);
      }
      wanted[at] = first.shape[at]!;
    }
  }
  if (wanted.filter((size) => size === -1).length === 1) {
    const rest = product(wanted.filter((size) => size !== -1));
    wanted[wanted.indexOf(-1)] = rest > 0 ? quotient(first.elements, rest) : 0;
  }
  const found = new Sized(wanted, first.type);
  if (found.elements !== first.elements) {
    throw operation.refused(
      `shape [${first.shape.join(", ")}] does not become [${wanted.join(", ")}]`,
    );
  }
  return followed(wanted, first.type, first.values);
};

const transpose: Rule = (operation, given) => {
  const { shape, type } = input(operation, given);
  const order = operation.integers("perm") ?? upTo(shape.length).reverse();
  const sorted = [...order].sort((a, b) => a - b);
  if (sorted.length !== shape.length || sorted.some((axis, at) => axis !== at)) {
    throw operation.refused(`[${order.join(", ")}] is no order of ${shape.length} axes`);
  }
  return new Sized(
    order.map((axis) => shape[axis]!),
    type,
  );
};

const squeeze: Rule = (operation, given) => {
  const { shape, type, values } = input(operation, given);
  const axes = optionalValues(operation, given, 1);
  const gone = axes
    ? axesOf(operation, axes, shape.length)
    : upTo(shape.length).filter((at) => shape[at] === 1);
  if (gone.some((at) => shape[at] !== 1)) {
    throw operation.refused(`shape [${shape.join(", ")}] is not 1 in [${gone.join(", ")}]`);
  }
  return followed(without(shape, gone, 0), type, values);
};

const unsqueeze: Rule = (operation, given) => {
  const { shape, type, values } = input(operation, given);
  const axes = valuesOf(operation, given, 1);
  const rank = shape.length + axes.length;
  const added = axesOf(operation, axes, rank);
  const sizes = shape.values();
  const found = upTo(rank).map((at) => (added.includes(at) ? 1 : sizes.next().value!));
  return followed(found, type, values);
};

const flatten: Rule = (operation, given) => {
  const { shape, type } = input(operation, given);
  const axis = operation.integer("axis", 1);
  if (axis < -shape.length || axis > shape.length) {
    throw operation.refused(`there is no axis ${axis} of ${shape.length}`);
  }
  const at = axis < 0 ? axis + shape.length : axis;
  return new Sized([product(shape.slice(0, at)), product(shape.slice(at))], type);
};

const identity: Rule = (operation, given) => input(operation, given);

const expand: Rule = (operation, given) => {
  const first = input(operation, given);
  const wanted = valuesOf(operation, given, 1);
  if (wanted.some((size) => size < 0)) {
    throw operation.refused(`there is no shape [${wanted.join(", ")}]`);
  }
  const shape = broadcast(operation, [first.shape, wanted]);
  const count = product(shape);
  const one = first.values?.length === 1 && count <= MOST_VALUES;
  return followed(shape, first.type, one ? upTo(count).map(() => first.values![0]!) : first.values);
};

const tile: Rule = (operation, given) => {
  const { shape, type } = input(operation, given);
  const times = valuesOf(operation, given, 1);
  if (times.length !== shape.length) {
    throw operation.refused(
      `shape [${shape.join(", ")}] is not repeated [${times.join(", ")}] times`,
    );
  }
  return new Sized(
    shape.map((size, at) => size * times[at]!),
    type,
  );
};

function replaced(shape: Shape, axis: number, ...sizes: readonly number[]): number[] {
  return [...shape.slice(0, axis), ...sizes, ...shape.slice(axis + 1)];
}

const concat: Rule = (operation, given) => {
  const arrays = inputs(operation, given, Math.max(given.length, 1));
  const first = arrays[0]!;
  const axis = axisOf(operation, operation.integer("axis", 0), first.shape.length);
  const rest = String(without(first.shape, [axis], 1));
  const fits = arrays.every(
    ({ shape }) =>
      shape.length === first.shape.length && String(without(shape, [axis], 1)) === rest,
  );
  if (!fits) throw operation.refused("shapes do not fit");
  const total = arrays.reduce((sum, { shape }) => sum + shape[axis]!, 0);
  const known = total <= MOST_VALUES && arrays.every(({ values }) => values !== null);
  const values = known ? arrays.flatMap((array) => array.values ?? []) : null;
  return followed(replaced(first.shape, axis, total), first.type, values);
};

const split: Rule = (operation, given) => {
  const { shape, type } = input(operation, given);
  const axis = axisOf(operation, operation.integer("axis", 0), shape.length);
  const size = shape[axis]!;
  const count = operation.outputs.length;
  let parts = optionalValues(operation, given, 1);
  if (!parts) {
    if (operation.integer("num_outputs", count) !== count) {
      throw operation.refused("it has not as many outputs as it says");
    }
    const each = quotient(size + count - 1, count);
    parts = upTo(count).map((at) => Math.max(0, Math.min(each, size - at * each)));
  }
  if (parts.reduce((sum, part) => sum + part, 0) !== size || parts.length !== count) {
    throw operation.refused(`${size} is not cut into [${parts.join(", ")}]`);
  }
  const outputs = parts.map((part) => new Sized(replaced(shape, axis, part), type));
  return { outputs, working_bytes: 0 };
};

const slice: Rule = (operation, given) => {
  const first = input(operation, given);
  const starts = valuesOf(operation, given, 1);
  const ends = valuesOf(operation, given, 2);
  const named = optionalValues(operation, given, 3) ?? upTo(starts.length);
  const axes = axesOf(operation, named, first.shape.length);
  const steps = optionalValues(operation, given, 4) ?? starts.map(() => 1);
  const lengths = [ends, axes, steps].map(({ length }) => length);
  if (lengths.some((length) => length !== starts.length) || steps.includes(0)) {
    throw operation.refused("its inputs do not fit each other");
  }
  const shape = [...first.shape];
  let values = first.values;
  for (const [n, axis] of axes.entries()) {
    const size = shape[axis]!;
    const step = steps[n]!;
    const [from, count] = places(starts[n]!, ends[n]!, step, size);
    shape[axis] = count;
    if (values) {
      const before: readonly number[] = values;
      values = upTo(count).map((at) => before[from + at * step]!);
    }
  }
  return followed(shape, first.type, values);
};

/** The first element of an axis that a slice has, and how many; a start is always in the axis. */
function places(start: number, end: number, step: number, size: number): [number, number] {
  const [first, last] = [start, end].map((at) => (at < 0 ? at + size : at)) as [number, number];
  const clamp = (at: number, least: number, most: number) => Math.min(Math.max(at, least), most);
  const from = step > 0 ? clamp(first, 0, size) : Math.min(Math.max(first, 0), size - 1);
  const to = step > 0 ? clamp(last, 0, size) : Math.min(Math.max(last, -1), size - 1);
  const apart = step > 0 ? to - from : from - to;
  return [from, apart <= 0 ? 0 : quotient(apart - 1, Math.abs(step)) + 1];
}

const gather: Rule = (operation, given) => {
  const [first, at] = inputs(operation, given, 2) as [Sized, Sized];
  const axis = axisOf(operation, operation.integer("axis", 0), first.shape.length);
  const shape = replaced(first.shape, axis, ...at.shape);
  const { values } = first;
  const found = values && at.values?.map((n) => values[n < 0 ? n + values.length : n]);
  const known = found?.every((value) => value !== undefined) ? found : null;
  return followed(shape, first.type, known);
};

const gatherElements: Rule = (operation, given) =>
  new Sized(input(operation, given, 1).shape, input(operation, given).type);

const scatter: Rule = (operation, given) => {
  const [first, at] = inputs(operation, given, 2) as [Sized, Sized];
  return { outputs: [new Sized(first.shape, first.type)], working_bytes: at.bytes };
};

const gatherNd: Rule = (operation, given) => {
  const [first, places] = inputs(operation, given, 2) as [Sized, Sized];
  const batch = operation.integer("batch_dims", 0);
  if (places.shape.length === 0 || batch < 0 || batch >= places.shape.length) {
    throw operation.refused("its indices have no last dimension");
  }
  const at = batch + places.shape.at(-1)!;
  if (at > first.shape.length) {
    throw operation.refused(`shape [${first.shape.join(", ")}] has no ${at} axes`);
  }
  return new Sized([...places.shape.slice(0, -1), ...first.shape.slice(at)], first.type);
};

const pad: Rule = (operation, given) => {
  const first = input(operation, given);
  const pads = valuesOf(operation, given, 1);
  const named = optionalValues(operation, given, 3) ?? upTo(first.shape.length);
  const axes = axesOf(operation, named, first.shape.length);
  if (pads.length !== 2 * axes.length) {
    throw operation.refused(`${pads.length} sizes do not pad ${axes.length} axes`);
  }
  const shape = [...first.shape];
  for (const [n, axis] of axes.entries()) shape[axis]! += pads[n]! + pads[axes.length + n]!;
  return new Sized(shape, first.type);
};

const range: Rule = (operation, given) => {
  const numbers = upTo(3).flatMap((number) => valuesOf(operation, given, number));
  const [start, limit, step] = numbers as [number, number, number];
  if (numbers.length !== 3 || !step || numbers.some((n) => Math.abs(n) >= LARGEST_NUMBER)) {
    throw operation.refused(`there is no range of [${numbers.join(", ")}]`);
  }
  const apart = step > 0 ? limit - start : start - limit;
  const count = apart <= 0 ? 0 : quotient(apart - 1, Math.abs(step)) + 1;
  const values = count <= MOST_VALUES ? upTo(count).map((n) => start + n * step) : null;
  return followed([count], input(operation, given).type, values);
};

const top: Rule = (operation, given) => {
  const first = input(operation, given);
  const count = valuesOf(operation, given, 1);
  const axis = axisOf(operation, operation.integer("axis", -1), first.shape.length);
  if (count.length !== 1) throw operation.refused("it says no number of elements");
  const shape = replaced(first.shape, axis, ...count);
  return {
    outputs: [new Sized(shape, first.type), new Sized(shape, INT64)],
    working_bytes: first.bytes,
  };
};

const negated: Rule = (operation, given) => {
  const first = input(operation, given);
  return oneByOne(
    operation,
    [first],
    first.type,
    exact((a) => 0 - a!),
  );
};

const castLike: Rule = (operation, given) =>
  new Sized(input(operation, given).shape, input(operation, given, 1).type);

const all = (names: string, rule: Rule): [string, Rule][] =>
  names.split(" ").map((name) => [name, rule]);

const RULES: ReadonlyMap<string, Rule> = new Map([
  ...all(
    "Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Ceil Celu Clip Cos Cosh CumSum Elu Erf Exp " +
      "Floor Gelu HardSigmoid HardSwish LeakyRelu Log Mish PRelu Reciprocal Relu Round Selu " +
      "Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Tan Tanh ThresholdedRelu Trilu",
    same,
  ),
  ...all("IsInf IsNaN Not", truthOf),
  ...all("BitShift BitwiseAnd BitwiseOr BitwiseXor Pow Sum", arithmetic()),
  ...all("And Or Xor", comparison()),
  ...all(
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd " +
      "ReduceSum ReduceSumSquare",
    reduced,
  ),
  ...all("ArgMax ArgMin", arg),
  ...all("LogSoftmax Softmax", softmax),
  ...all("ScatterElements ScatterND", scatter),
  ["Add", arithmetic((a, b) => a! + b!)],
  ["Cast", cast],
  ["CastLike", castLike],
  ["Concat", concat],
  ["Conv", conv],
  ["Div", arithmetic((a, b) => (a! >= 0 && b! > 0 ? quotient(a!, b!) : null))],
  ["Equal", comparison((a, b) => a === b)],
  ["Expand", expand],
  ["Flatten", flatten],
  ["Gather", gather],
  ["GatherElements", gatherElements],
  ["GatherND", gatherNd],
  ["Gemm", gemm],
  ["Greater", comparison((a, b) => a > b)],
  ["GreaterOrEqual", comparison((a, b) => a >= b)],
  ["Identity", identity],
  ["LayerNormalization", layerNormalization],
  ["Less", comparison((a, b) => a < b)],
  ["LessOrEqual", comparison((a, b) => a <= b)],
  ["MatMul", matmul],
  ["Max", arithmetic(Math.max)],
  ["Min", arithmetic(Math.min)],
  ["Mod", arithmetic((a, b) => (a! >= 0 && b! > 0 ? a! % b! : null))],
  ["Mul", arithmetic((a, b) => a! * b!)],
  ["Neg", negated],
  ["Pad", pad],
  ["Range", range],
  ["Reshape", reshape],
  ["Shape", shapeOf],
  ["Size", sizeOf],
  ["Slice", slice],
  ["Split", split],
  ["Squeeze", squeeze],
  ["Sub", arithmetic((a, b) => a! - b!)],
  ["Tile", tile],
  ["TopK", top],
  ["Transpose", transpose],
  ["Unsqueeze", unsqueeze],
  ["Where", where],
]);
