/**
 * What a device keeps for graphs, and how they are run. Its core has checked who may ask for what;
 * `cleave/machine/graph_run.py` is the same in Python.
 */

import { DType, itemBytes } from "../kernels/kernel";
import { narrow, widen } from "../kernels/numbers";
import { GraphError } from "./errors";
import type { GivenInput, GraphMemory } from "./graph_memory";
import type { GpuArray, GpuMemory } from "./gpu_memory";
import {
  free,
  type GraphSession,
  type Input,
  type Kept,
  type OpenGraph,
  type Operand,
  type Value,
} from "./graph_session";
import { type FetchOrder, type GraphOrder, IndexType, type Sent } from "./orders";

type Entry =
  | {
      readonly kind: "graph";
      readonly model: Uint8Array;
      memory: Pick<GraphMemory, "peakBytes"> | null;
      session: GraphSession | null;
    }
  | { readonly kind: "array"; readonly array: PutArray }
  | { readonly kind: "value"; readonly value: Operand };

/**
 * An array that was put. It stays as it came: 16 bits take half the memory of fp32, and are upcast
 * for each run on the processor. The GPU's copy is in fp32, and is made once.
 */
class PutArray implements Kept {
  #copy: GpuArray | null = null;

  constructor(
    readonly dtype: DType,
    readonly payload: Uint8Array,
  ) {}

  get elements(): number {
    return this.payload.length / itemBytes(this.dtype);
  }

  async read(): Promise<Float32Array> {
    return this.#numbers();
  }

  async part(from: number, to: number): Promise<Float32Array<ArrayBuffer>> {
    const size = itemBytes(this.dtype);
    return widen(this.payload.slice(from * size, to * size), this.dtype);
  }

  async onGpu(memory: GpuMemory): Promise<GpuArray | null> {
    this.#copy ??= await memory.make(this.elements, this.#numbers());
    return this.#copy;
  }

  free(): void {
    this.#copy?.free();
    this.#copy = null;
  }

  #numbers(): Float32Array {
    const { dtype, payload } = this;
    if (dtype !== DType.FP32) return widen(payload, dtype);
    return new Float32Array(payload.buffer, payload.byteOffset, this.elements);
  }
}

/** Zeros for one run. */
class Zeros implements Kept {
  #copy: GpuArray | null = null;

  constructor(readonly elements: number) {}

  read(): Promise<Float32Array> {
    return this.part(0, this.elements);
  }

  async part(from: number, to: number): Promise<Float32Array<ArrayBuffer>> {
    return new Float32Array(to - from);
  }

  async onGpu(memory: GpuMemory): Promise<GpuArray | null> {
    this.#copy ??= await memory.make(this.elements);
    return this.#copy;
  }

  free(): void {
    this.#copy?.free();
    this.#copy = null;
  }
}

/** Finds the memory that runs of a graph work in; it throws where the model is no graph. */
export type MemoryOf = (model: Uint8Array) => Pick<GraphMemory, "peakBytes">;

/** Keeps arrays, and runs graphs on them that write others, or replace some. */
export class GraphStore {
  readonly #entries = new Map<bigint, Entry>();

  /**
   * @param open makes a graph ready, at its first run
   * @param now_s a clock
   * @param memoryOf looks at a graph, before anything else does
   */
  constructor(
    private readonly open: OpenGraph,
    private readonly now_s: () => number,
    private readonly memoryOf: MemoryOf,
  ) {}

  /** Keep what was sent. */
  keep(id: bigint, sent: Sent): void {
    if (sent.kind === "graph") {
      this.#entries.set(id, { kind: "graph", model: sent.payload, memory: null, session: null });
    } else if (sent.kind === "array") {
      this.#entries.set(id, {
        kind: "array",
        array: new PutArray(sent.dtype, aligned(sent.payload)),
      });
    } else {
      this.#entries.set(id, { kind: "value", value: indices(sent.type, sent.payload) });
    }
  }

  /** Make one array of the rows of some, which are forgotten. Where one is missing, none is made. */
  join(id: bigint, ids: readonly bigint[]): void {
    const parts = ids.map((part) => this.#entries.get(part));
    for (const part of ids) this.#delete(part);
    const arrays = parts.flatMap((part) => (part?.kind === "array" ? [part.array] : []));
    const [first] = arrays;
    if (!first || arrays.length < parts.length) return;
    const payload = new Uint8Array(arrays.reduce((sum, part) => sum + part.payload.length, 0));
    let at = 0;
    for (const part of arrays) {
      payload.set(part.payload, at);
      at += part.payload.length;
    }
    this.#entries.set(id, { kind: "array", array: new PutArray(first.dtype, payload) });
  }

  /** Forget arrays and graphs. */
  async forget(ids: readonly bigint[]): Promise<void> {
    for (const id of ids) {
      const entry = this.#delete(id);
      if (entry?.kind === "graph") await entry.session?.close();
    }
  }

  /** Forget an array or a graph, and free what the array occupies in a GPU's memory. */
  #delete(id: bigint): Entry | undefined {
    const entry = this.#entries.get(id);
    this.#entries.delete(id);
    if (entry?.kind === "array") entry.array.free();
    if (entry?.kind === "value") free(entry.value);
    return entry;
  }

  /**
   * Run a graph; all outputs that are wanted are kept then, or none. What they were to replace is
   * lost where it fails. The seconds that it took.
   *
   * @param room_bytes what it may work in
   * @throws Error when it cannot be run, needs more memory, or its outputs are not as large as was
   *   said
   */
  async run(order: GraphOrder, room_bytes: number): Promise<number> {
    try {
      this.#refuseTooLarge(order, room_bytes);
      return await this.#run(order);
    } catch (error) {
      for (const id of order.outputs) this.#delete(id);
      throw error;
    }
  }

  /** Refuse a run that needs more memory than it may work in, before anything of it is made. */
  #refuseTooLarge({ graph, inputs, outputs }: GraphOrder, room_bytes: number): void {
    const entry = this.#entries.get(graph);
    if (entry?.kind !== "graph") throw new GraphError(`graph ${graph} is not here`);
    entry.memory ??= this.memoryOf(entry.model);
    const given = inputs.map((id) => this.#given(id));
    const needed = entry.memory.peakBytes(
      given,
      outputs.map((id) => id !== 0n),
    );
    if (needed > room_bytes) {
      throw new GraphError(
        `the run needs ${needed} bytes, but only ${Math.max(room_bytes, 0)} are free; send fewer ` +
          `rows, or drop arrays first`,
      );
    }
  }

  #given(id: bigint): GivenInput {
    if (id === 0n) return { elements: null, narrow: false };
    const entry = this.#entry(id);
    const elements = elementsOf(entry);
    return { elements, narrow: entry.kind === "array" && entry.array.dtype !== DType.FP32 };
  }

  async #run({ graph, inputs, outputs, output_bytes }: GraphOrder): Promise<number> {
    const entry = this.#entries.get(graph);
    if (entry?.kind !== "graph") throw new GraphError(`graph ${graph} is not here`);
    entry.session ??= await this.open(entry.model); // the time that this takes is spent once
    const { session } = entry;
    if (inputs.length !== session.inputs.length || outputs.length !== session.outputs.length) {
      throw new GraphError(
        `the graph has ${session.inputs.length} inputs and ${session.outputs.length} outputs, ` +
          `not ${inputs.length} and ${outputs.length}`,
      );
    }
    const began_s = this.now_s();
    const given = new Map(
      session.inputs.map((input, n) => [input.name, this.#shaped(input, inputs[n]!)]),
    );
    const zeros = session.inputs.flatMap(({ name }, n) =>
      inputs[n] === 0n ? [given.get(name)!] : [],
    );
    const kept = outputs.flatMap((id, n) => (id === 0n ? [] : [{ id, name: session.outputs[n]! }]));
    const names = kept.length > 0 ? kept.map(({ name }) => name) : session.outputs;
    let found: ReadonlyMap<string, Operand>;
    try {
      found = await session.run(given, names);
    } finally {
      zeros.forEach(free);
    }
    const values = kept.map(({ name }) => found.get(name)!);
    const wrong = values.findIndex((value, n) => bytesOf(value) !== output_bytes[n]);
    if (wrong >= 0 || kept.length === 0) for (const array of found.values()) free(array);
    if (wrong >= 0) {
      throw new GraphError(
        `an output is ${bytesOf(values[wrong]!)} bytes, not ${output_bytes[wrong]} as announced`,
      );
    }
    for (const [n, { id }] of kept.entries()) {
      this.#delete(id);
      this.#entries.set(id, { kind: "value", value: values[n]! });
    }
    return this.now_s() - began_s;
  }

  /**
   * Rows of an array, rounded to the dtype that is asked for.
   *
   * @throws GraphError when the array is not there, or has other rows or columns
   */
  async fetch(order: FetchOrder): Promise<Uint8Array<ArrayBuffer>> {
    const { array, first_row, rows, columns, out } = order;
    const entry = this.#entry(array);
    const items = elementsOf(entry);
    const numbers = entry.kind === "array" || entry.value.type === "float32";
    if (!numbers || items % columns !== 0 || (first_row + rows) * columns > items) {
      throw new GraphError(
        `an array of ${items} elements has no rows ${first_row} to ${first_row + rows} of ` +
          `${columns} columns`,
      );
    }
    const [from, to] = [first_row * columns, (first_row + rows) * columns];
    // A copy of these rows alone: it is given away.
    if (entry.kind === "array") return narrow(await entry.array.part(from, to), out);
    if ("kept" in entry.value) return narrow(await entry.value.kept.part(from, to), out);
    return narrow((entry.value.data as Float32Array).slice(from, to), out);
  }

  #entry(id: bigint): Exclude<Entry, { kind: "graph" }> {
    const entry = this.#entries.get(id);
    if (!entry || entry.kind === "graph") {
      throw new GraphError(`array ${id} is not here: what was to make it failed`);
    }
    return entry;
  }

  /** An input in the graph's shape, whose size that is not fixed follows from its own. */
  #shaped(input: Input, id: bigint): Operand {
    const fixed = input.shape.reduce<number>((n, size) => n * (isFixed(size) ? size : 1), 1);
    const free = input.shape.filter((size) => !isFixed(size)).length;
    const said = `[${input.shape.join(", ")}]`;
    if (id === 0n) {
      if (free > 0) {
        throw new GraphError(`the input ${input.name} cannot be zeros: its shape is ${said}`);
      }
      const shape = input.shape as readonly number[];
      return { type: "float32", shape, kept: new Zeros(fixed) };
    }
    const entry = this.#entry(id);
    const items = elementsOf(entry);
    const batch = free === 0 ? 1 : items / fixed;
    if (free > 1 || batch * fixed !== items || !Number.isSafeInteger(batch)) {
      throw new GraphError(
        `the input ${input.name} has the shape ${said}, and ${items} elements came`,
      );
    }
    const shape = input.shape.map((size) => (isFixed(size) ? size : batch));
    if (entry.kind === "array") return { type: "float32", shape, kept: entry.array };
    return { ...entry.value, shape };
  }
}

function isFixed(size: number | string): size is number {
  return typeof size === "number" && size >= 0;
}

function elementsOf(entry: Exclude<Entry, { kind: "graph" }>): number {
  if (entry.kind === "array") return entry.array.elements;
  return "kept" in entry.value ? entry.value.kept.elements : entry.value.data.length;
}

function bytesOf(array: Operand): number {
  if ("kept" in array) return array.kept.elements * Float32Array.BYTES_PER_ELEMENT;
  return array.data.byteLength;
}

function indices(type: IndexType, payload: Uint8Array): Value {
  const own = payload.slice();
  return type === IndexType.INT64
    ? { type: "int64", shape: [], data: new BigInt64Array(own.buffer) }
    : { type: `${type}`, shape: [], data: own };
}

/** The same bytes at an address that typed arrays of four-byte items accept. */
function aligned(bytes: Uint8Array): Uint8Array {
  return bytes.byteOffset % 4 === 0 ? bytes : bytes.slice();
}
