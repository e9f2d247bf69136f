/**
 * The device's state machine: arrays in, products wanted, results out. It knows no socket, clock or
 * element; `cleave/device/core.py` is the same in Python.
 */

import {
  type DType,
  dtypeNamed,
  flopsOf,
  itemBytes,
  type Matrix,
  type Product,
} from "../kernels/kernel";
import { cleanText } from "../protocol/codec";
import { ProtocolError } from "../protocol/errors";
import { MAX_HEADER_BYTES, MAX_MESSAGE_BYTES, MAX_RUNS_IN_FLIGHT } from "../protocol/limits";
import { type Message, type MessageOf, Op } from "../protocol/messages";

/** What the shell is to do. */
export type Action =
  | { readonly kind: "send"; readonly message: Message }
  /** Keep a matrix for products to come. */
  | { readonly kind: "hold"; readonly matrix: Matrix }
  /** No product that is asked for from now on names the matrix. */
  | { readonly kind: "forget"; readonly matrix: Matrix }
  /** Compute, then call `computed` or `failed`. */
  | { readonly kind: "compute"; readonly run: bigint; readonly product: Product };

interface Running {
  readonly product: Product;
  readonly bytes: number; // of the result
}

/** Why one run cannot be done; the session goes on. */
class CannotRun extends Error {}

/** One device's memory and tasks. */
export class DeviceCore {
  welcome: MessageOf<"welcome"> | null = null;
  draining = false;
  /** Blocks answered with a result. */
  blocks = 0;
  /** Floating-point operations of these. */
  flops = 0;
  readonly #store = new Map<bigint, { matrix: Matrix; bytes: number }>();
  readonly #running = new Map<bigint, Running>();
  #stored_bytes = 0;
  #results_bytes = 0; // of runs not yet answered

  /**
   * @param memory_bytes what it offered in `hello`; going over it is the PS's fault and ends the
   *   session
   */
  constructor(readonly memory_bytes: number) {}

  /** Whether every run it was given is answered. */
  get idle(): boolean {
    return this.#running.size === 0;
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
      case "run":
        return [this.#run(message)];
      case "drop":
        return this.#drop(message.ids);
      case "cancel":
        for (const run of message.ids) this.#take(run);
        return [];
      case "welcome":
        if (this.welcome) break;
        this.welcome = message;
        return [];
    }
    throw new ProtocolError(`a device does not expect a ${message.type} message here`);
  }

  /** The result of a run; nothing is sent if it was cancelled meanwhile. */
  computed(run: bigint, payload: Uint8Array, compute_s: number): Action[] {
    const running = this.#take(run);
    if (!running) return [];
    const { rows, columns, out } = running.product;
    this.blocks += 1;
    this.flops += flopsOf(running.product);
    const message: Message = {
      type: "result",
      id: run,
      rows,
      columns,
      dtype: out,
      compute_s: Math.max(0, compute_s),
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

  /** The session is over: nothing is wanted any more, and nothing is kept. */
  end(): Action[] {
    this.#running.clear();
    this.#results_bytes = 0;
    return this.#drop([...this.#store.keys()]);
  }

  #take(run: bigint): Running | undefined {
    const running = this.#running.get(run);
    if (running) {
      this.#running.delete(run);
      this.#results_bytes -= running.bytes;
    }
    return running;
  }

  #put({ id, rows, columns, dtype: name, payload }: MessageOf<"put">): Action[] {
    const dtype = knownDtype(name);
    const bytes = rows * columns * itemBytes(dtype);
    if (payload.length !== bytes) {
      throw new ProtocolError(
        `array ${id} came with ${payload.length} bytes; ${rows}x${columns} ${name} has ${bytes}`,
      );
    }
    if (this.#store.has(id)) throw new ProtocolError(`array ${id} was sent twice`);
    if (this.occupied_bytes + bytes > this.memory_bytes) {
      throw new ProtocolError(
        `array ${id} does not fit: ${this.occupied_bytes} of ${this.memory_bytes} bytes are ` +
          `taken and it has ${bytes}`,
      );
    }
    const matrix = { rows, columns, dtype, payload };
    this.#store.set(id, { matrix, bytes });
    this.#stored_bytes += bytes;
    return [{ kind: "hold", matrix }];
  }

  #drop(ids: readonly bigint[]): Action[] {
    const actions: Action[] = [];
    for (const id of ids) {
      const stored = this.#store.get(id);
      if (!stored) continue;
      this.#store.delete(id);
      this.#stored_bytes -= stored.bytes;
      actions.push({ kind: "forget", matrix: stored.matrix });
    }
    return actions;
  }

  #run(message: MessageOf<"run">): Action {
    if (this.#running.has(message.id)) {
      throw new ProtocolError(`run ${message.id} was asked for twice`);
    }
    if (this.#running.size >= MAX_RUNS_IN_FLIGHT) {
      throw new ProtocolError(
        `more than ${MAX_RUNS_IN_FLIGHT} runs were asked for and not yet answered`,
      );
    }
    const out = knownDtype(message.out);
    let product: Product;
    let bytes: number;
    try {
      product = this.#product(message, out);
      bytes = this.#resultBytes(product);
    } catch (error) {
      if (error instanceof CannotRun) return taskError(message.id, error.message);
      throw error;
    }
    this.#running.set(message.id, { product, bytes });
    this.#results_bytes += bytes;
    return { kind: "compute", run: message.id, product };
  }

  #product(message: MessageOf<"run">, out: DType): Product {
    if (message.op !== Op.MATMUL) {
      throw new CannotRun(`this device has no op '${message.op}', only 'matmul'`);
    }
    if (message.inputs.length === 0 || message.inputs.length % 2) {
      throw new CannotRun(`matmul needs pairs of arrays, not ${message.inputs.length}`);
    }
    const { transpose_a: transposeA, transpose_b: transposeB } = message;
    const pairs: [Matrix, Matrix][] = [];
    let rows = 0;
    let columns = 0;
    for (let i = 0; i < message.inputs.length; i += 2) {
      const a = this.#matrix(message.inputs[i] as bigint);
      const b = this.#matrix(message.inputs[i + 1] as bigint);
      const [m, depth] = transposeA ? [a.columns, a.rows] : [a.rows, a.columns];
      const [bDepth, n] = transposeB ? [b.columns, b.rows] : [b.rows, b.columns];
      const dtype = pairs[0]?.[0].dtype ?? a.dtype;
      if (depth !== bDepth || a.dtype !== dtype || b.dtype !== dtype) {
        throw new CannotRun(
          `a ${m}x${depth} ${a.dtype} array cannot be multiplied by a ${bDepth}x${n} ` +
            `${b.dtype} one`,
        );
      }
      if (i > 0 && (m !== rows || n !== columns)) {
        throw new CannotRun(`products of different shapes cannot be added: ${m}x${n}`);
      }
      [rows, columns] = [m, n];
      pairs.push([a, b]);
    }
    if (out !== "fp32" && out !== pairs[0]?.[0].dtype) {
      throw new CannotRun(`the result is asked for as ${out}, which no input is`);
    }
    return { pairs, transposeA, transposeB, rows, columns, out };
  }

  #resultBytes({ rows, columns, out }: Product): number {
    const bytes = rows * columns * itemBytes(out);
    if (bytes > MAX_MESSAGE_BYTES - MAX_HEADER_BYTES) {
      throw new CannotRun(`a result of ${bytes} bytes fits no message`);
    }
    if (this.occupied_bytes + bytes > this.memory_bytes) {
      throw new CannotRun(
        `the result has ${bytes} bytes and ${this.occupied_bytes} of ${this.memory_bytes} are taken`,
      );
    }
    return bytes;
  }

  #matrix(id: bigint): Matrix {
    const stored = this.#store.get(id);
    if (!stored) throw new CannotRun(`array ${id} is not here`);
    return stored.matrix;
  }
}

function taskError(run: bigint, reason: string): Action {
  return { kind: "send", message: { type: "task_error", id: run, reason: cleanText(reason) } };
}

function knownDtype(name: string): DType {
  const dtype = dtypeNamed(name);
  if (dtype === undefined) throw new ProtocolError(`unknown dtype '${name.slice(0, 40)}'`);
  return dtype;
}
