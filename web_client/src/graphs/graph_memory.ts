/**
 * The memory that a run of a graph works in, found before it runs, as docs/protocol.md (*Working
 * memory*) has it. `cleave/machine/graph_memory.py` is the same in Python. Models are those that
 * `checkGraph` accepted.
 */

import { GraphError } from "./errors";
import {
  type Attribute,
  FLOAT32,
  followed,
  INT64,
  isFollowed,
  itemBytesOf,
  LARGEST_NUMBER,
  LARGEST_RANK,
  MOST_VALUES,
  Operation,
  product,
  Refusal,
  Sized,
  UnboundedError,
} from "./graph_arrays";
import { type Given, type Made, madeBy } from "./graph_operations";
import {
  AttributeField,
  GraphField,
  ModelField,
  NodeField,
  OpsetField,
  ShapeField,
  SizeField,
  TensorField,
  TensorTypeField,
  TypeField,
  ValueField,
} from "./onnx_fields";
import { fields, type FieldValue, ProtobufError, signedFields, signedIntegers } from "./protobuf";

/** Versions of ONNX's operations that the sizes of arrays are known for. */
const FIRST_OPSET = 18;
const LAST_OPSET = 23;

/** Operations whose output is their input's memory. */
const VIEWS: ReadonlySet<string> = new Set([
  "Flatten",
  "Identity",
  "Reshape",
  "Squeeze",
  "Unsqueeze",
]);

/** Micro-batches of a step have two sizes at most. */
const MOST_KEPT = 16;
const MOST_INTEGERS = 4096; // of an attribute

/** What a run gives to an input: how many elements, null for zeros; whether they have 16 bits. */
export interface GivenInput {
  readonly elements: number | null;
  readonly narrow: boolean;
}

type Size = number | string;

/** A graph as its bytes say it, with its own arrays and operations. */
interface Graph {
  /** By name, in order; sizes that are not fixed have a name. */
  readonly inputs: Map<string, { type: number; sizes: readonly Size[] }>;
  readonly outputs: string[];
  readonly constants: Map<string, Sized>;
  readonly operations: Operation[];
}

/** Finds the working memory of runs of one graph. */
export class GraphMemory {
  readonly #graph: Graph;
  readonly #inputs: readonly string[];
  readonly #found = new Map<string, number>();

  /** @throws GraphError where the memory of no run can be found */
  constructor(model: Uint8Array) {
    this.#graph = reading(() => read(model));
    this.#inputs = [...this.#graph.inputs.keys()].filter(
      (name) => !this.#graph.constants.has(name),
    );
  }

  /**
   * The memory that a run works in, beside its inputs and the outputs that are kept.
   *
   * @param given for each input, in order; constants are no inputs
   * @param kept for each output, in order
   * @throws GraphError where it is not known before the run, or inputs do not fit
   */
  peakBytes(given: readonly GivenInput[], kept: readonly boolean[]): number {
    const key = JSON.stringify([given.map(({ elements, narrow }) => [elements, narrow]), kept]);
    const known = this.#found.get(key);
    if (known !== undefined) return known;
    const found = reading(() => this.#peak(given, kept));
    if (this.#found.size >= MOST_KEPT) this.#found.clear();
    this.#found.set(key, found);
    return found;
  }

  #peak(given: readonly GivenInput[], kept: readonly boolean[]): number {
    const graph = this.#graph;
    if (given.length !== this.#inputs.length || kept.length !== graph.outputs.length) {
      throw new UnboundedError(
        Refusal.SHAPE,
        `the graph has ${this.#inputs.length} inputs and ${graph.outputs.length} outputs, not ` +
          `${given.length} and ${kept.length}`,
      );
    }
    const inputs = this.#inputs.map((name, n) => {
      const { type, sizes } = graph.inputs.get(name)!;
      return { name, sizes, of: given[n]!, sized: sized(name, type, sizes, given[n]!) };
    });
    const found = new Pass(graph, new Map(inputs.map((one) => [one.name, one.sized])), new Map());
    const wanted = new Set(graph.outputs.filter((_, n) => kept[n]));
    const widened = new Map<string, number>();
    let held = 0;
    for (const { name, sizes, of, sized } of inputs) {
      const whole = open(sizes) > 0 || found.enclosed.has(name);
      if (of.narrow && !whole) widened.set(name, sized.bytes);
      else if (of.narrow || (of.elements === null && !found.isAddedTo(name, wanted))) {
        held += sized.bytes;
      }
    }
    return held + found.peakBytes(wanted, widened);
  }
}

/** Read something; what is no message is no model. */
function reading<T>(what: () => T): T {
  try {
    return what();
  } catch (error) {
    if (!(error instanceof ProtobufError)) throw error;
    throw new GraphError(`it is not an ONNX model: ${error.message}`);
  }
}

/** One way through a graph with inputs of known shapes. */
class Pass {
  readonly known: Map<string, Sized>;
  /** Names of arrays that graphs inside operations use. */
  readonly enclosed = new Set<string>();
  readonly #free: ReadonlySet<string>; // names of what the run does not make
  readonly #taken: ReadonlySet<string>[] = []; // by operation, what it takes
  readonly #maker = new Map<string, number>();
  readonly #working: number[] = [];

  /** @param outer what is known of arrays of graphs around it */
  constructor(
    private readonly graph: Graph,
    inputs: ReadonlyMap<string, Sized>,
    outer: ReadonlyMap<string, Sized>,
  ) {
    this.known = new Map([...outer, ...graph.constants, ...inputs]);
    this.#free = new Set([...graph.constants.keys(), ...inputs.keys()]);
    for (const [number, operation] of graph.operations.entries()) {
      const inner = enclosedBy(operation);
      for (const name of inner) this.enclosed.add(name);
      const made = this.#made(operation);
      if (operation.outputs.length > made.outputs.length) {
        throw operation.refused(`it has ${operation.outputs.length} outputs`);
      }
      for (const [n, name] of operation.outputs.entries()) {
        if (!name) continue;
        if (this.#maker.has(name) || this.#free.has(name)) {
          throw new UnboundedError(Refusal.NAME, `the array ${name.slice(0, 60)} is made twice`);
        }
        this.#maker.set(name, number);
        this.known.set(name, made.outputs[n]!);
      }
      this.#taken.push(new Set([...operation.inputs.filter(Boolean), ...inner]));
      this.#working.push(made.working_bytes);
    }
    for (const name of graph.outputs) {
      if (!this.known.has(name)) {
        throw new UnboundedError(Refusal.NAME, `nothing makes the output ${name.slice(0, 60)}`);
      }
    }
  }

  /** What is known of its outputs, in order. */
  get outputs(): Sized[] {
    return this.graph.outputs.map((name) => this.known.get(name)!);
  }

  #made(operation: Operation): Made {
    const given: Given = operation.inputs.map((name) => (name ? this.#of(name) : null));
    switch (operation.name) {
      case "Constant":
      case "ConstantOfShape":
        return { outputs: [constant(operation, given)], working_bytes: 0 };
      case "If":
        return this.#branches(operation);
      case "Scan":
        return this.#scan(operation, given);
      default:
        return madeBy(operation, given);
    }
  }

  #of(name: string): Sized {
    const found = this.known.get(name);
    if (found) return found;
    throw new UnboundedError(
      Refusal.NAME,
      `the array ${name.slice(0, 60)} is taken before anything makes it`,
    );
  }

  /** Go through a graph that an operation holds. */
  #inside(operation: Operation, name: string, inputs: readonly Sized[]): Pass {
    const attribute = operation.attributes.get(name);
    if (!attribute) throw operation.refused(`it has no graph ${name}`);
    const graph = graphOf(attribute.graph, true);
    const names = [...graph.inputs.keys()];
    if (inputs.length !== names.length) {
      throw operation.refused(`its graph has ${names.length} inputs`);
    }
    return new Pass(graph, new Map(names.map((each, n) => [each, inputs[n]!])), this.known);
  }

  #branches(operation: Operation): Made {
    const yes = this.#inside(operation, "then_branch", []);
    const no = this.#inside(operation, "else_branch", []);
    if (!areAlike(yes.outputs, no.outputs)) {
      throw operation.refused("its branches do not make the same shapes");
    }
    const peaks = [yes, no].map((inside) => inside.peakBytes(new Set(), new Map()));
    return {
      outputs: yes.outputs.map(({ shape, type }) => new Sized(shape, type)),
      working_bytes: Math.max(...peaks),
    };
  }

  #scan(operation: Operation, given: Given): Made {
    const rows = operation.integer("num_scan_inputs", 0);
    const arrays = given.flatMap((one) => (one ? [one] : []));
    const states = arrays.length - rows;
    if (!operation.attributes.has("body") || rows < 1 || states < 0 || given.includes(null)) {
      throw operation.refused("its inputs do not fit its graph");
    }
    const made = operation.outputs.length - states;
    for (const [name, count] of [
      ["scan_input_axes", rows],
      ["scan_output_axes", made],
    ] as const) {
      const axes = operation.integers(name);
      if (axes && (axes.length !== count || axes.some((axis) => axis !== 0))) {
        throw operation.refused("it goes along another axis than the first");
      }
    }
    const scanned = arrays.slice(states);
    const times = scanned[0]!.shape[0];
    if (times === undefined || scanned.some(({ shape }) => shape[0] !== times)) {
      throw operation.refused("the arrays that it goes along have not as many rows");
    }
    const held = arrays.slice(0, states).map(({ shape, type }) => new Sized(shape, type));
    const inside = this.#inside(operation, "body", [
      ...held,
      ...scanned.map(({ shape, type }) => new Sized(shape.slice(1), type)),
    ]);
    const found = inside.outputs;
    if (found.length !== operation.outputs.length) {
      throw operation.refused(`its graph has ${found.length} outputs`);
    }
    if (!areAlike(found.slice(0, states), held)) {
      throw operation.refused("its state changes its shape");
    }
    const rest = found.slice(states).map(({ shape, type }) => new Sized([times, ...shape], type));
    const turning = held.reduce((sum, { bytes }) => sum + bytes, 0);
    return {
      outputs: [...held, ...rest],
      working_bytes: inside.peakBytes(new Set(), new Map()) + turning,
    };
  }

  /** Whether an output that is kept is an input plus something, and nothing else takes that. */
  isAddedTo(name: string, wanted: ReadonlySet<string>): boolean {
    const takers = this.graph.operations.filter((_, n) => this.#taken[n]!.has(name));
    const [operation] = takers;
    if (!operation || takers.length !== 1 || this.graph.outputs.includes(name)) return false;
    const [output = ""] = operation.outputs;
    return (
      operation.name === "Add" &&
      operation.inputs.filter((input) => input === name).length === 1 &&
      wanted.has(output) &&
      String(this.known.get(output)!.shape) === String(this.known.get(name)!.shape)
    );
  }

  /**
   * The most bytes that are there at the same time: in the order of the model, or two thirds of
   * those in the order in which each operation comes as late as can be.
   *
   * @param kept names of outputs that do not count
   * @param widened by input, its bytes in each operation that takes it
   */
  peakBytes(kept: ReadonlySet<string>, widened: ReadonlyMap<string, number>): number {
    const memory = this.#memory(kept);
    const written = this.#most([...this.#taken.keys()], memory, kept, widened);
    const late = this.#most(this.#late(), memory, kept, widened);
    return Math.max(written, Math.floor((late * 2) / 3));
  }

  #most(
    order: readonly number[],
    memory: ReadonlyMap<string, string>,
    kept: ReadonlySet<string>,
    widened: ReadonlyMap<string, number>,
  ): number {
    const uses = new Map<string, number>();
    const use = (name: string, more: number) => uses.set(name, (uses.get(name) ?? 0) + more);
    const owners = this.#taken.map((taken) => {
      const found = [...taken].flatMap((name) => memory.get(name) ?? []);
      return new Set(found);
    });
    for (const each of owners) for (const name of each) use(name, 1);
    for (const name of new Set(this.graph.outputs)) use(memory.get(name) ?? "", 1); // to the end
    const bytes = (name: string) => this.known.get(name)!.bytes;
    let live = 0;
    let peak = 0;
    for (const number of order) {
      const made = this.graph.operations[number]!.outputs.filter(
        (name) => name && memory.get(name) === name && !kept.has(name),
      );
      for (const name of made) live += bytes(name);
      let now = live + this.#working[number]!;
      for (const name of this.#taken[number]!) now += widened.get(name) ?? 0;
      peak = Math.max(peak, now);
      for (const name of owners[number]!) use(name, -1);
      for (const name of new Set([...owners[number]!, ...made])) {
        if (name && !kept.has(name) && !uses.get(name)) live -= bytes(name);
      }
    }
    return peak;
  }

  /**
   * By array that a run makes, the one in whose memory it is; empty for inputs. A product that is
   * only added to an input, for an output that is kept, is in that output's.
   */
  #memory(kept: ReadonlySet<string>): Map<string, string> {
    const found = new Map<string, string>();
    const ends = new Set([...this.graph.outputs, ...this.enclosed]);
    const turned = this.#turned(ends);
    const takers = new Map<string, number>();
    for (const taken of this.#taken) {
      for (const name of taken) takers.set(name, (takers.get(name) ?? 0) + 1);
    }
    for (const { name: operation, inputs, outputs } of this.graph.operations) {
      const [output = ""] = outputs;
      if ((VIEWS.has(operation) && !ends.has(output)) || turned.has(output)) {
        found.set(output, found.get(inputs[0]!) ?? "");
        continue;
      }
      const others = inputs.filter((name) => !this.#free.has(name));
      if (operation === "Add" && kept.has(output) && others.length === 1) {
        const name = others[0]!;
        const { shape } = this.known.get(output)!;
        const maker = found.has(name) ? this.graph.operations[this.#maker.get(name)!] : null;
        const alone = takers.get(name) === 1 && !ends.has(name);
        const alike = String(this.known.get(name)!.shape) === String(shape);
        if (maker?.name === "MatMul" && shape.length === 2 && alike && alone) found.set(name, "");
      }
      for (const name of outputs) if (name) found.set(name, name);
    }
    return found;
  }

  /** The matrices turned round that only products take: these read them as they are. */
  #turned(ends: ReadonlySet<string>): Set<string> {
    const found = new Set<string>();
    const others = new Set(ends); // what anything but a product takes
    for (const operation of [...this.graph.operations].reverse()) {
      const [output = ""] = operation.outputs;
      if (operation.name === "Transpose" && !others.has(output)) {
        const { shape, type } = this.known.get(output)!;
        const rank = shape.length;
        const swaps = [...shape.keys()].slice(0, -2).concat(rank - 1, rank - 2);
        const order = operation.integers("perm");
        const asked = order && order.length > 0 ? order : [...shape.keys()].reverse();
        if (rank > 1 && type === FLOAT32 && String(asked) === String(swaps)) {
          found.add(output);
          continue;
        }
      }
      if (operation.name !== "MatMul") for (const name of operation.inputs) others.add(name);
    }
    return found;
  }

  /**
   * The operations, each as late as can be: from the last of those that nothing needs, each after
   * all that it needs; of these the one that stands last first.
   */
  #late(): number[] {
    const needs = this.#taken.map((taken) => {
      const makers = [...taken].flatMap((name) => this.#maker.get(name) ?? []);
      return [...new Set(makers)].sort((a, b) => a - b);
    });
    const needed = new Set(needs.flat());
    const todo = [...needs.keys()]
      .filter((number) => !needed.has(number))
      .map((number) => ({ number, done: false }));
    const seen = new Set<number>();
    const order: number[] = [];
    for (let next = todo.pop(); next; next = todo.pop()) {
      const { number, done } = next;
      if (done) order.push(number);
      else if (!seen.has(number)) {
        seen.add(number);
        todo.push({ number, done: true });
        for (const other of needs[number]!) {
          if (!seen.has(other)) todo.push({ number: other, done: false });
        }
      }
    }
    return order;
  }
}

function areAlike(some: readonly Sized[], others: readonly Sized[]): boolean {
  const said = (arrays: readonly Sized[]) =>
    JSON.stringify(arrays.map(({ shape, type }) => [shape, type]));
  return said(some) === said(others);
}

function constant(operation: Operation, given: Given): Sized {
  const value = operation.attributes.get("value");
  if (operation.name === "Constant") {
    if (value) return tensor(value.tensor);
    if (operation.attributes.has("value_int")) {
      return followed([], INT64, [operation.integer("value_int", 0)]);
    }
    const found = operation.integers("value_ints");
    if (found) return followed([found.length], INT64, found);
    if (operation.attributes.has("value_float")) return new Sized([], FLOAT32);
    throw operation.refused("it has no value");
  }
  const shape = given[0]?.values;
  if (!shape) throw operation.refused("its shape is not known before the run");
  const filled = value ? tensor(value.tensor) : new Sized([1], FLOAT32);
  const made = new Sized(shape, filled.type);
  if (filled.values?.length !== 1 || made.elements > MOST_VALUES) return made;
  return followed(shape, filled.type, Array(made.elements).fill(filled.values[0]!));
}

/** The names of arrays that graphs inside an operation take and do not make. */
function enclosedBy(operation: Operation): Set<string> {
  const found = new Set<string>();
  for (const { graph: message } of operation.attributes.values()) {
    if (message.length === 0) continue;
    const graph = graphOf(message, true);
    const own = new Set([...graph.inputs.keys(), ...graph.constants.keys()]);
    const take = (name: string) => {
      if (name && !own.has(name)) found.add(name);
    };
    for (const inner of graph.operations) {
      for (const name of [...inner.inputs, ...enclosedBy(inner)]) take(name);
      for (const name of inner.outputs) own.add(name);
    }
    for (const name of graph.outputs) take(name);
  }
  return found;
}

/** How many sizes are not fixed. */
function open(sizes: readonly Size[]): number {
  return sizes.filter((size) => typeof size === "string").length;
}

/** An input in its shape, whose size that is not fixed follows from its elements. */
function sized(name: string, type: number, sizes: readonly Size[], given: GivenInput): Sized {
  const free = open(sizes);
  const fixed = product(sizes.filter((size) => typeof size === "number"));
  const shown = `the input ${name.slice(0, 60)}`;
  if (given.elements === null) {
    if (free > 0) {
      throw new UnboundedError(
        Refusal.SHAPE,
        `${shown} cannot be zeros: its shape is [${sizes.join(", ")}]`,
      );
    }
    return new Sized(sizes as readonly number[], type);
  }
  const batch = free > 0 && fixed > 0 ? Math.floor(given.elements / fixed) : 1;
  if (free > 1 || fixed < 0 || batch * fixed !== given.elements) {
    throw new UnboundedError(
      Refusal.SHAPE,
      `${shown} has the shape [${sizes.join(", ")}], and ${given.elements} elements came`,
    );
  }
  return new Sized(
    sizes.map((size) => (typeof size === "number" ? size : batch)),
    type,
  );
}

// --- reading -------------------------------------------------------------------------------------

function read(model: Uint8Array): Graph {
  const versions = new Set<number>();
  for (const [number, value] of fields(model)) {
    if (number !== ModelField.OPSET) continue;
    let version = 0;
    for (const [part, held] of typeof value === "number" ? [] : fields(value)) {
      if (part === OpsetField.VERSION && typeof held === "number") version = held;
    }
    versions.add(version);
  }
  const [version = 0] = versions;
  if (versions.size !== 1 || version < FIRST_OPSET || version > LAST_OPSET) {
    throw new UnboundedError(
      Refusal.OPSET,
      `a graph must use one of the ONNX operator sets ${FIRST_OPSET} to ${LAST_OPSET}, but this ` +
        `one uses ${[...versions].join(", ") || "none"}`,
    );
  }
  return graphOf(joined(model, ModelField.GRAPH), false);
}

function graphOf(message: Uint8Array, inside: boolean): Graph {
  const graph: Graph = { inputs: new Map(), outputs: [], constants: new Map(), operations: [] };
  for (const [number, value] of messages(message)) {
    if (number === GraphField.NODE) graph.operations.push(operation(value));
    else if (number === GraphField.CONSTANT) {
      graph.constants.set(nameOf(value, TensorField.NAME), tensor(value));
    } else if (number === GraphField.INPUT) {
      const name = nameOf(value, ValueField.NAME);
      if (graph.inputs.has(name)) {
        throw new UnboundedError(Refusal.NAME, `the input ${name.slice(0, 60)} occurs twice`);
      }
      graph.inputs.set(name, inside ? { type: 0, sizes: [] } : inputOf(value));
    } else if (number === GraphField.OUTPUT) graph.outputs.push(nameOf(value, ValueField.NAME));
  }
  return graph;
}

function operation(message: Uint8Array): Operation {
  const found = new Operation();
  for (const [number, value] of messages(message)) {
    if (number === NodeField.INPUT) found.inputs.push(text(value));
    else if (number === NodeField.OUTPUT) found.outputs.push(text(value));
    else if (number === NodeField.OPERATION) found.name = text(value);
    else if (number === NodeField.ATTRIBUTE) {
      const name = nameOf(value, AttributeField.NAME);
      if (found.attributes.has(name)) {
        throw new UnboundedError(
          Refusal.NAME,
          `${found.name}: the attribute ${name.slice(0, 60)} occurs twice`,
        );
      }
      found.attributes.set(name, attribute(value));
    }
  }
  return found;
}

function attribute(message: Uint8Array): Attribute {
  const found: Attribute = { integer: 0, integers: [], text: "", tensor: NONE, graph: NONE };
  for (const [number, value] of signedFields(message)) {
    if (number === AttributeField.INTEGERS) {
      for (const each of signedIntegers(value)) {
        found.integers.push(within(each));
        if (found.integers.length >= MOST_INTEGERS) {
          throw new UnboundedError(Refusal.SHAPE, "an attribute has too many integers");
        }
      }
    } else if (typeof value === "number") {
      if (number === AttributeField.INTEGER) found.integer = within(value);
    } else if (number === AttributeField.TEXT) found.text = text(value);
  }
  found.tensor = joined(message, AttributeField.TENSOR);
  found.graph = joined(message, AttributeField.GRAPH);
  return found;
}

/** What is known of a constant. */
function tensor(message: Uint8Array): Sized {
  const sizes: number[] = [];
  let values: number[] = [];
  let type = 0;
  let raw: Uint8Array = NONE;
  for (const [number, value] of signedFields(message)) {
    if (number === TensorField.SIZE) {
      for (const size of signedIntegers(value)) {
        if (sizes.length <= LARGEST_RANK) sizes.push(within(size));
      }
    } else if (number === TensorField.INT32 || number === TensorField.INT64) {
      for (const each of signedIntegers(value)) {
        if (values.length <= MOST_VALUES) values.push(within(each));
      }
    } else if (typeof value === "number") {
      if (number === TensorField.TYPE) type = value;
    } else if (number === TensorField.BYTES) raw = value;
  }
  const found = new Sized(sizes, type);
  if (sizes.length > 1 || !isFollowed(type) || found.elements > MOST_VALUES) return found;
  if (raw.length > 0) values = elementsOf(raw, itemBytesOf(type));
  return followed(sizes, type, values);
}

/** Integers of 1, 4 or 8 bytes, little-endian. */
function elementsOf(raw: Uint8Array, bytes: number): number[] {
  const view = new DataView(raw.buffer, raw.byteOffset, raw.byteLength);
  const found: number[] = [];
  for (let at = 0; at + bytes <= raw.length; at += bytes) {
    if (bytes === 8) found.push(within(Number(view.getBigInt64(at, true))));
    else found.push(bytes === 4 ? view.getInt32(at, true) : view.getInt8(at));
  }
  return found;
}

/** The type of an input's elements, and its sizes. */
function inputOf(message: Uint8Array): { type: number; sizes: readonly Size[] } {
  const kind = joined(joined(message, ValueField.TYPE), TypeField.TENSOR);
  const sizes: Size[] = [];
  let shapes = 0;
  let type = 0;
  for (const [number, value] of fields(kind)) {
    if (typeof value === "number") {
      if (number === TensorTypeField.ELEMENT) type = value;
    } else if (number === TensorTypeField.SHAPE) {
      shapes += 1;
      for (const [part, size] of messages(value)) {
        if (part === ShapeField.SIZE && sizes.length <= LARGEST_RANK) sizes.push(sizeIn(size));
      }
    }
  }
  if (shapes === 0) throw new UnboundedError(Refusal.SHAPE, "an input has no shape");
  return { type, sizes };
}

/** A size, or the name of one that is not fixed. */
function sizeIn(message: Uint8Array): Size {
  let found: Size = "";
  for (const [number, value] of signedFields(message)) {
    if (number === SizeField.NUMBER && typeof value === "number") found = within(value);
    else if (number === SizeField.NAME && typeof value !== "number") found = text(value);
  }
  return found;
}

const NONE = new Uint8Array();

/** A message's name: of several the last counts. */
function nameOf(message: Uint8Array, field: number): string {
  let found = "";
  for (const [number, value] of messages(message)) if (number === field) found = text(value);
  return found;
}

/** A message in a message: of several, one after another, which is all of them. */
function joined(message: Uint8Array, field: number): Uint8Array {
  const parts: Uint8Array[] = [];
  for (const [number, value] of messages(message)) if (number === field) parts.push(value);
  if (parts.length === 1) return parts[0]!;
  const found = new Uint8Array(parts.reduce((sum, { length }) => sum + length, 0));
  let at = 0;
  for (const part of parts) {
    found.set(part, at);
    at += part.length;
  }
  return found;
}

/** The fields that are texts, bytes or messages. */
function* messages(message: Uint8Array): Generator<readonly [number, Uint8Array]> {
  for (const [number, value] of fields(message) as Iterable<readonly [number, FieldValue]>) {
    if (typeof value !== "number") yield [number, value];
  }
}

function text(value: Uint8Array): string {
  return new TextDecoder("utf-8", { ignoreBOM: true }).decode(value);
}

/** A number, or the largest that there is. */
function within(value: number): number {
  return Math.max(-LARGEST_NUMBER, Math.min(value, LARGEST_NUMBER));
}
