/**
 * The device's state machine: arrays in, products wanted, results out. It knows no socket, clock or
 * element; `cleave/device/core.py` is the same in Python.
 */

import { decode } from "../coding/exponents";
import { IndexType } from "../graphs/orders";
import { flopsOf, itemBytes, type Matrix, type Shape } from "../kernels/kernel";
import { ProtocolError } from "../protocol/errors";
import {
  MAX_GRAPH_BYTES,
  MAX_HEADER_BYTES,
  MAX_MESSAGE_BYTES,
  MAX_RUNS_IN_FLIGHT,
} from "../protocol/limits";
import { Feature, type Message, type MessageOf } from "../protocol/messages";
import { type Action, taskError } from "./actions";
import { CannotRun, knownDtype, productOf } from "./products";

interface Running {
  readonly bytes: number; // of the result
  readonly flops: number;
  /** What the result is; null where a graph keeps its outputs here. */
  readonly shape: Shape | null;
  /** The outputs that a graph keeps here. */
  readonly outputs: readonly Output[];
}

/** Who has the elements of an array that was put. */
enum Place {
  /** Nobody asked for them yet. */
  HERE,
  KERNEL,
  GRAPHS,
}

/** A server says what a graph takes: no device does more than this in one run. */
const MOST_FLOPS = 1e15;

type OfGraphs = Extract<Message, { type: "graph" | "concat" | "run_graph" | "fetch" }>;

/** An output of a graph, which its run has made or will make. */
interface Output {
  readonly kind: "output";
  readonly bytes: number;
  made: boolean;
}

/** What was put, or made, under an id. */
type Stored =
  | { readonly kind: "array"; readonly matrix: Matrix; readonly bytes: number; place: Place }
  | { readonly kind: "indices" | "joined" | "graph"; readonly bytes: number }
  | Output;

/** The arrays and graphs that a device still has after its connection was lost. */
export interface HeldArrays {
  /** What `welcome` called them. */
  readonly of: string;
  readonly store: ReadonlyMap<bigint, Stored>;
}

/** A PS names arrays and runs from here on while it tests a device (docs/protocol.md). */
const FIRST_OF_TESTS = 2n ** 52n;

/** One device's memory and tasks. */
export class DeviceCore {
  welcome: MessageOf<"welcome"> | null = null;
  draining = false;
  /** Whether the PS allows results to come coded. */
  codes_results = false;
  /** Arrays and answers of the tests with which the PS measures the device: these are no work. */
  tests = 0;
  /** Blocks answered with a result. */
  blocks = 0;
  /** Floating-point operations of these. */
  flops = 0;
  /** Graphs among these blocks. */
  graphs = 0;
  readonly #store = new Map<bigint, Stored>();
  readonly #running = new Map<bigint, Running>();
  #stored_bytes = 0;
  #results_bytes = 0; // of runs not yet answered

  /**
   * @param memory_bytes what it offered in `hello`; going over it is the PS's fault and ends the
   *   session
   * @param offers the features that it named, each of which it has once the PS names it
   * @param resumes what it still has from its last session, which `hello` names in `holds`
   */
  constructor(
    readonly memory_bytes: number,
    private readonly offers: readonly string[] = [],
    private resumes: HeldArrays | null = null,
  ) {}

  /** Whether a feature is part of this session. */
  #has(feature: Feature): boolean {
    return this.offers.includes(feature) && this.welcome?.features.includes(feature) === true;
  }

  /** Whether every run it was given is answered. */
  get idle(): boolean {
    return this.#running.size === 0;
  }

  /** Whether it has work to answer, tests aside. */
  get busy(): boolean {
    return [...this.#running.keys()].some((run) => run < FIRST_OF_TESTS);
  }

  /** Bytes that count against `memory_bytes` now. */
  get occupied_bytes(): number {
    return this.#stored_bytes + this.#results_bytes;
  }

  /** Whether the answer to a run is still wanted. */
  wants(run: bigint): boolean {
    return this.#running.has(run);
  }

  /**
   * Take a message of the PS other than `bye` and `error`.
   *
   * @throws ProtocolError for a message that a PS must not send; the session is to be ended
   */
  received(message: Message): Action[] {
    switch (message.type) {
      case "put":
        return this.#put(message);
      case "put_coded":
        this.#need(Feature.CODING, message);
        return this.#putCoded(message);
      case "code_results":
        this.#need(Feature.CODING, message);
        this.codes_results = true;
        return [];
      case "run":
        return this.#run(message);
      case "graph":
      case "concat":
      case "run_graph":
      case "fetch":
        this.#need(Feature.GRAPHS, message);
        return this.#ofGraphs(message);
      case "drop":
        return this.#drop(message.ids);
      case "cancel":
        for (const run of message.ids) this.#take(run);
        return [];
      case "welcome":
        if (this.welcome) break;
        this.welcome = message;
        return this.#resume(message.arrays);
    }
    throw new ProtocolError(`a device does not expect a ${message.type} message here`);
  }

  /** The result of a run; nothing is sent if it was cancelled meanwhile. */
  computed(run: bigint, payload: Uint8Array, compute_s: number): Action[] {
    const running = this.#take(run);
    if (!running) return [];
    if (run >= FIRST_OF_TESTS) this.tests += 1;
    else {
      this.blocks += 1;
      this.flops += running.flops;
    }
    for (const output of running.outputs) output.made = true;
    const seconds = Math.max(0, compute_s);
    if (!running.shape) {
      this.graphs += 1;
      return [{ kind: "send", message: { type: "computed", id: run, compute_s: seconds } }];
    }
    const message: Message = {
      type: "result",
      id: run,
      ...running.shape,
      compute_s: seconds,
      payload,
    };
    return [{ kind: "send", message }];
  }

  /** A run could not be done. */
  failed(run: bigint, reason: string): Action[] {
    return this.#take(run) ? [taskError(run, reason)] : [];
  }

  /** The owner wants the device back: take nothing new, answer what is there. */
  drain(): Action[] {
    if (this.draining) return [];
    this.draining = true;
    return [{ kind: "send", message: { type: "drain" } }];
  }

  /**
   * The arrays and graphs that the device may keep if its connection is lost now; null if there are
   * none of use. Outputs that no run has made yet are not among them, nor what only a kernel has.
   */
  get held(): HeldArrays | null {
    if (!this.welcome) return this.resumes;
    const { arrays } = this.welcome;
    if (!this.#has(Feature.KEEPS) || !arrays || this.draining) return null;
    const kept = [...this.#store].filter(
      ([, stored]) =>
        !(stored.kind === "output" && !stored.made) &&
        !(stored.kind === "array" && stored.place === Place.KERNEL),
    );
    const graphs = kept.some(([, { kind }]) => kind === "graph");
    return graphs ? { of: arrays, store: new Map(kept) } : null;
  }

  /** The session is over: nothing is wanted any more, and only `held` is kept. */
  end(held: HeldArrays | null = null): Action[] {
    this.#running.clear();
    this.#results_bytes = 0;
    const actions = this.#drop([...this.#store.keys()].filter((id) => !held?.store.has(id)));
    this.#store.clear();
    this.#stored_bytes = 0;
    this.resumes = null;
    return actions;
  }

  /** Tell the PS what the device still has, or drop it where the PS does not know it any more. */
  #resume(arrays: string): Action[] {
    const held = this.resumes;
    this.resumes = null;
    if (!held) return [];
    for (const [id, stored] of held.store) {
      this.#store.set(id, stored);
      this.#stored_bytes += stored.bytes;
    }
    const ids = [...held.store.keys()];
    if (held.of !== arrays || !this.#has(Feature.KEEPS)) return this.#drop(ids);
    return [{ kind: "send", message: { type: "held", ids } }];
  }

  #take(run: bigint): Running | undefined {
    const running = this.#running.get(run);
    if (running) {
      this.#running.delete(run);
      this.#results_bytes -= running.bytes;
    }
    return running;
  }

  #need(feature: Feature, { type }: Message): void {
    if (this.#has(feature)) return;
    throw new ProtocolError(`${type} belongs to a feature that is not part of this session`);
  }

  #putCoded({ id, rows, columns, dtype: name, payload }: MessageOf<"put_coded">): Action[] {
    const dtype = knownDtype(name);
    const bytes = rows * columns * itemBytes(dtype);
    this.#needRoom(id, bytes); // before any memory is taken for it
    const decoded = decode(payload, dtype, bytes);
    return this.#put({ type: "put", id, rows, columns, dtype, payload: decoded });
  }

  #put({ id, rows, columns, dtype: name, payload }: MessageOf<"put">): Action[] {
    const indices = this.#has(Feature.GRAPHS) ? indexTypeNamed(name) : undefined;
    const itemsize = indices ? INDEX_BYTES[indices] : itemBytes(knownDtype(name));
    const bytes = rows * columns * itemsize;
    if (payload.length !== bytes) {
      throw new ProtocolError(
        `array ${id} came with ${payload.length} bytes; ${rows}x${columns} ${name} has ${bytes}`,
      );
    }
    if (indices) {
      this.#keep(id, { kind: "indices", bytes });
      return [{ kind: "keep", id, sent: { kind: "indices", type: indices, payload } }];
    }
    const matrix = { rows, columns, dtype: knownDtype(name), payload };
    // Where there may be graphs, it shows at the first use whether the kernel or they need it.
    const place = this.#has(Feature.GRAPHS) ? Place.HERE : Place.KERNEL;
    if (id >= FIRST_OF_TESTS) this.tests += 1;
    this.#keep(id, { kind: "array", matrix, bytes, place });
    return place === Place.HERE ? [] : [{ kind: "hold", matrix }];
  }

  #needRoom(id: bigint, bytes: number): void {
    if (this.#store.has(id)) throw new ProtocolError(`array ${id} was sent twice`);
    if (this.occupied_bytes + bytes > this.memory_bytes) {
      throw new ProtocolError(
        `array ${id} needs ${bytes} bytes, but ${this.occupied_bytes} of ${this.memory_bytes} ` +
          `bytes are in use`,
      );
    }
  }

  #keep(id: bigint, stored: Stored): void {
    this.#needRoom(id, stored.bytes);
    this.#store.set(id, stored);
    this.#stored_bytes += stored.bytes;
  }

  #drop(ids: readonly bigint[]): Action[] {
    const actions: Action[] = [];
    const kept: bigint[] = [];
    for (const id of ids) {
      const stored = this.#store.get(id);
      if (!stored) continue;
      this.#store.delete(id);
      this.#stored_bytes -= stored.bytes;
      if (stored.kind !== "array" || stored.place === Place.GRAPHS) kept.push(id);
      else if (stored.place === Place.KERNEL) {
        actions.push({ kind: "forget", matrix: stored.matrix });
      }
    }
    if (kept.length > 0) actions.push({ kind: "discard", ids: kept });
    return actions;
  }

  #ofGraphs(message: OfGraphs): Action[] {
    switch (message.type) {
      case "graph":
        return this.#graph(message);
      case "concat":
        return this.#concat(message);
      case "run_graph":
        return this.#begin(message.id, () => this.#graphRun(message));
      case "fetch":
        return this.#begin(message.id, () => this.#fetch(message));
    }
  }

  #graph({ id, payload }: MessageOf<"graph">): Action[] {
    const bytes = payload.length;
    if (bytes > MAX_GRAPH_BYTES) {
      throw new ProtocolError(`graph ${id} has ${bytes} bytes, over ${MAX_GRAPH_BYTES}`);
    }
    this.#keep(id, { kind: "graph", bytes });
    return [{ kind: "keep", id, sent: { kind: "graph", payload } }];
  }

  #concat({ id, ids }: MessageOf<"concat">): Action[] {
    const parts = ids.map((part) => this.#store.get(part));
    const kinds = new Set(
      parts.map((part) =>
        part?.kind === "array" ? `${part.matrix.columns} ${part.matrix.dtype}` : "none",
      ),
    );
    if (kinds.size !== 1 || kinds.has("none") || new Set(ids).size < ids.length) {
      throw new ProtocolError(
        `array ${id} cannot be made of arrays ${ids.slice(0, 8)}: it takes arrays that were put, ` +
          "each once, all of the same columns and dtype",
      );
    }
    if (this.#store.has(id)) throw new ProtocolError(`array ${id} was sent twice`);
    const actions: Action[] = ids.flatMap((part) => this.#given(part));
    let bytes = 0;
    for (const part of ids) {
      bytes += this.#store.get(part)?.bytes ?? 0;
      this.#store.delete(part);
    }
    this.#store.set(id, { kind: "joined", bytes });
    return [...actions, { kind: "join", id, ids }];
  }

  #graphRun(message: MessageOf<"run_graph">): Begun {
    const { id, graph, inputs, outputs, output_bytes, flops } = message;
    const kept = outputs.filter((name) => name !== 0n);
    if (kept.length !== output_bytes.length) {
      throw new ProtocolError(
        `run ${id} keeps ${kept.length} outputs and says the size of ${output_bytes.length}`,
      );
    }
    const replaced = this.#replaced(message, kept);
    const seen = new Set<bigint>();
    for (const name of kept) {
      if (seen.has(name) || (this.#store.has(name) && !replaced.includes(name))) {
        throw new ProtocolError(`array ${name} was sent twice`);
      }
      seen.add(name);
    }
    const made = new Map(
      kept.map((name, n): [bigint, Output] => [
        name,
        { kind: "output", bytes: output_bytes[n]!, made: false },
      ]),
    );
    // Even if this run fails, what it replaces is lost.
    for (const name of replaced) this.#store.set(name, made.get(name)!);
    if (this.#store.get(graph)?.kind !== "graph") {
      throw new CannotRun(`graph ${graph} is not here`, replaced);
    }
    for (const name of inputs) {
      const kind = name === 0n ? "zeros" : this.#store.get(name)?.kind;
      if (kind === undefined || kind === "graph") {
        throw new CannotRun(`array ${name} is not here`, replaced);
      }
    }
    const given = inputs.flatMap((name) => this.#given(name, replaced));
    for (const [name, output] of made) {
      if (!replaced.includes(name)) this.#keep(name, output);
    }
    const order = { run: id, graph, inputs, outputs, output_bytes };
    return {
      running: {
        bytes: 0,
        flops: Math.min(Number(flops), MOST_FLOPS),
        shape: null,
        outputs: [...made.values()],
      },
      actions: [...given, { kind: "graph", order }],
    };
  }

  /** Outputs of earlier runs, inputs of this one, whose places its outputs take. */
  #replaced(
    { inputs, output_bytes }: MessageOf<"run_graph">,
    kept: readonly bigint[],
  ): readonly bigint[] {
    return kept.filter((name, n) => {
      const before = this.#store.get(name);
      const once = inputs.filter((input) => input === name).length === 1;
      return before?.kind === "output" && once && before.bytes === output_bytes[n];
    });
  }

  #fetch({ id, array, first_row, rows, columns, out: name }: MessageOf<"fetch">): Begun {
    const out = knownDtype(name);
    const kind = this.#store.get(array)?.kind;
    const numbers = kind === "array" || kind === "joined" || kind === "output";
    if (!numbers || columns === 0) throw new CannotRun(`array ${array} is not here`);
    const bytes = this.#checkedRoom(rows * columns * itemBytes(out));
    const order = { run: id, array, first_row, rows, columns, out };
    const shape = { rows, columns, dtype: out };
    return {
      running: { bytes, flops: 0, shape, outputs: [] },
      actions: [...this.#given(array), { kind: "fetch", order }],
    };
  }

  /** What gives an array to the graphs, if they do not have it. */
  #given(id: bigint, lost: readonly bigint[] = []): Action[] {
    const stored = this.#store.get(id);
    if (stored?.kind !== "array" || stored.place === Place.GRAPHS) return [];
    if (stored.place === Place.KERNEL) {
      // Kernels give nothing back, and a PS uses an array for either.
      const reason = `array ${id} is where matrices are multiplied, and not here for graphs`;
      throw new CannotRun(reason, lost);
    }
    const { dtype, payload } = stored.matrix;
    stored.place = Place.GRAPHS;
    stored.matrix.payload = new Uint8Array();
    return [{ kind: "keep", id, sent: { kind: "array", dtype, payload } }];
  }

  /** What begins a run, or says why it cannot be done. */
  #begin(run: bigint, make: () => Begun): Action[] {
    if (this.#running.has(run)) throw new ProtocolError(`run ${run} was asked for twice`);
    if (this.#running.size >= MAX_RUNS_IN_FLIGHT) {
      throw new ProtocolError(
        `more than ${MAX_RUNS_IN_FLIGHT} runs were asked for and not yet answered`,
      );
    }
    try {
      const { running, actions } = make();
      this.#running.set(run, running);
      this.#results_bytes += running.bytes;
      return actions;
    } catch (error) {
      if (error instanceof CannotRun) {
        const lost: Action[] = error.lost.length > 0 ? [{ kind: "discard", ids: error.lost }] : [];
        return [...lost, taskError(run, error.message)];
      }
      throw error;
    }
  }

  #run(message: MessageOf<"run">): Action[] {
    return this.#begin(message.id, () => {
      const out = knownDtype(message.out);
      const product = productOf(message, out, (id) => this.#matrix(id));
      const { rows, columns } = product;
      const bytes = this.#checkedRoom(rows * columns * itemBytes(out));
      const shape = { rows, columns, dtype: out };
      const actions: Action[] = this.#held(message.inputs);
      actions.push({ kind: "compute", run: message.id, product });
      return { running: { bytes, flops: flopsOf(product), shape, outputs: [] }, actions };
    });
  }

  /** What gives arrays to the kernel that it does not have. */
  #held(ids: readonly bigint[]): Action[] {
    const actions: Action[] = [];
    for (const id of ids) {
      const stored = this.#store.get(id);
      if (stored?.kind !== "array" || stored.place !== Place.HERE) continue;
      stored.place = Place.KERNEL;
      actions.push({ kind: "hold", matrix: stored.matrix });
    }
    return actions;
  }

  /** The bytes of a result, if there is room for it. */
  #checkedRoom(bytes: number): number {
    if (bytes > MAX_MESSAGE_BYTES - MAX_HEADER_BYTES) {
      throw new CannotRun(`a result of ${bytes} bytes fits no message`);
    }
    if (this.occupied_bytes + bytes > this.memory_bytes) {
      throw new CannotRun(
        `the result needs ${bytes} bytes, but ${this.occupied_bytes} of ${this.memory_bytes} ` +
          `are in use`,
      );
    }
    return bytes;
  }

  #matrix(id: bigint): Matrix {
    const stored = this.#store.get(id);
    if (stored?.kind !== "array") throw new CannotRun(`array ${id} is not here`);
    if (stored.place === Place.GRAPHS) {
      throw new CannotRun(`array ${id} is where graphs run, and not here for products`);
    }
    return stored.matrix;
  }
}

/** A run that can be done: what is noted of it, and what does it. */
interface Begun {
  readonly running: Running;
  readonly actions: Action[];
}

const INDEX_BYTES: { readonly [T in IndexType]: number } = {
  [IndexType.INT64]: 8,
  [IndexType.BOOL]: 1,
  [IndexType.UINT8]: 1,
};

function indexTypeNamed(name: string): IndexType | undefined {
  return Object.values(IndexType).find((type) => type === name);
}
