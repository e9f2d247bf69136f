/**
 * Arrays and operations of a graph, as far as the sizes of what it computes follow from them.
 * `cleave/machine/graph_arrays.py` is the same in Python.
 */

import { GraphError } from "./errors";

/** Numbers from here on are not told apart. */
export const LARGEST_NUMBER = 2 ** 53;
export const LARGEST_RANK = 32;
/** Arrays of more elements are never followed by value. */
export const MOST_VALUES = 64;

/** ONNX's numbers of the types that arrays of graphs have. */
export const FLOAT32 = 1;
const UINT8 = 2;
export const INT32 = 6;
export const INT64 = 7;
export const BOOL = 9;

const ITEM_BYTES: ReadonlyMap<number, number> = new Map([
  [FLOAT32, 4],
  [UINT8, 1],
  [INT32, 4],
  [INT64, 8],
  [BOOL, 1],
]);

/** Bytes of an element; 0 for a type that graphs do not have. */
export const itemBytesOf = (type: number): number => ITEM_BYTES.get(type) ?? 0;

/** Types of arrays that are followed by value. */
export const isFollowed = (type: number): boolean =>
  type === INT32 || type === INT64 || type === BOOL;

/** Why the memory of a run is not known before it. */
export enum Refusal {
  OPSET = "opset",
  OPERATION = "operation",
  TYPE = "type",
  NAME = "name",
  SHAPE = "shape",
  SIZE = "size",
}

/** The memory of a run is not known before it. */
export class UnboundedError extends GraphError {
  constructor(
    readonly refusal: Refusal,
    text: string,
  ) {
    super(text);
  }
}

export type Shape = readonly number[];
export type Values = readonly number[] | null;

export function product(sizes: Shape): number {
  return sizes.reduce((all, size) => all * size, 1);
}

/** What is known of an array before a run: `values` are its elements, null where not known. */
export class Sized {
  readonly elements: number;

  constructor(
    readonly shape: Shape,
    readonly type: number,
    readonly values: Values = null,
  ) {
    if (itemBytesOf(type) === 0) {
      throw new UnboundedError(Refusal.TYPE, `graphs have no arrays of the element type ${type}`);
    }
    if (shape.length > LARGEST_RANK) {
      throw new UnboundedError(
        Refusal.SHAPE,
        `an array has ${shape.length} dimensions, more than ${LARGEST_RANK}`,
      );
    }
    const said = `an array has the shape [${shape.join(", ")}]`;
    if (shape.some((size) => size < 0)) throw new UnboundedError(Refusal.SHAPE, said);
    if (product(shape.map((size) => Math.max(size, 1))) >= LARGEST_NUMBER) {
      throw new UnboundedError(Refusal.SIZE, said);
    }
    this.elements = product(shape);
  }

  get bytes(): number {
    return this.elements * itemBytesOf(this.type);
  }
}

/** An array, with its elements where these can be followed. */
export function followed(shape: Shape, type: number, values: Values): Sized {
  const known =
    values !== null &&
    isFollowed(type) &&
    shape.length <= 1 &&
    values.length <= MOST_VALUES &&
    values.length === product(shape);
  return new Sized(shape, type, known ? values : null);
}

/** An attribute's value, where it is one of these. */
export interface Attribute {
  integer: number;
  integers: number[];
  text: string;
  tensor: Uint8Array;
  graph: Uint8Array;
}

/** An operation of a graph. */
export class Operation {
  name = "";
  /** Names of arrays; empty where an optional one is left out. */
  readonly inputs: string[] = [];
  readonly outputs: string[] = [];
  readonly attributes = new Map<string, Attribute>();

  integer(name: string, otherwise: number): number {
    return this.attributes.get(name)?.integer ?? otherwise;
  }

  integers(name: string): readonly number[] | null {
    return this.attributes.get(name)?.integers ?? null;
  }

  /** The error for something that makes the size of what it computes unknown. */
  refused(what: string): UnboundedError {
    return new UnboundedError(Refusal.SHAPE, `${this.name.slice(0, 60)}: ${what.slice(0, 400)}`);
  }
}
