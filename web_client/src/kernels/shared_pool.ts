/** WASM threads over one shared memory: a product is split into rows among them. */

import type { Crew } from "./crew";
import {
  flopsOf,
  itemBytes,
  type Kernel,
  KernelName,
  type Matrix,
  type Outcome,
  type Product,
} from "./kernel";
import { type Placed, type Rows, SCRATCH_BYTES } from "./wasm";
import type { WasmMemory } from "./wasm_memory";

/** Parts that a thread is given before the first of them is done. */
const IN_FLIGHT = 2;

/** A part below this is over sooner than a thread is told of it. */
const PART_FLOPS = 4e6;

/** Parts are whole tiles of the WASM kernel in height. */
const PART_ROWS = 4;

interface Held extends Placed {
  readers: number;
  forgotten: boolean;
}

/** One product under way. */
interface Job {
  readonly product: Product<Held>;
  readonly parts: Rows[]; // not yet begun
  readonly out: number;
  readonly wanted: () => boolean;
  readonly resolve: (outcome: Outcome | null) => void;
  readonly reject: (reason: unknown) => void;
  begun: boolean;
  left: number; // parts not yet done
  compute_s: number; // of all parts
  reason: string;
}

/** Matrices lie in the shared memory once; every thread has scratch of its own there. */
export class SharedPool implements Kernel {
  readonly name = KernelName.WASM;
  readonly about: string;
  readonly lost: Promise<string>;
  readonly #crew: Crew;
  readonly #memory: WasmMemory;
  readonly #held = new Map<Matrix, Held>();
  readonly #jobs: Job[] = []; // with parts not yet begun
  readonly #busy: number[];

  /**
   * @param crew its threads
   * @param module matmul.shared.wasm
   * @param memory a shared one
   */
  constructor(crew: Crew, module: WebAssembly.Module, memory: WasmMemory) {
    this.about = `${crew.size} ${crew.size === 1 ? "thread" : "threads, shared memory"}`;
    this.#crew = crew;
    this.#memory = memory;
    this.lost = crew.lost;
    this.#busy = Array(crew.size).fill(0);
    for (let thread = 0; thread < crew.size; thread++) {
      const scratch = memory.take(SCRATCH_BYTES);
      crew.tell(thread, { kind: "shared", module, memory: memory.memory, scratch });
    }
  }

  hold(matrix: Matrix): void {
    const { rows, columns, dtype } = matrix;
    const pointer = this.#memory.place(matrix.payload);
    this.#held.set(matrix, { rows, columns, dtype, pointer, readers: 0, forgotten: false });
    matrix.payload = new Uint8Array();
  }

  forget(matrix: Matrix): void {
    const held = this.#held.get(matrix);
    if (!held) return;
    this.#held.delete(matrix);
    held.forgotten = true;
    if (held.readers === 0) this.#memory.give(held.pointer);
  }

  multiply(product: Product, wanted: () => boolean): Promise<Outcome | null> {
    return new Promise((resolve, reject) => {
      const pairs = product.pairs.map(([a, b]) => [this.#find(a), this.#find(b)] as const);
      const out = this.#memory.take(product.rows * product.columns * itemBytes(product.out));
      const parts = split(product.rows, flopsOf(product), this.#crew.size);
      for (const held of pairs.flat()) held.readers += 1;
      this.#jobs.push({
        product: { ...product, pairs },
        parts,
        out,
        wanted,
        resolve,
        reject,
        begun: false,
        left: parts.length,
        compute_s: 0,
        reason: "",
      });
      this.#next();
    });
  }

  close(): void {
    this.#jobs.length = 0;
    this.#crew.close();
  }

  #find(matrix: Matrix): Held {
    const held = this.#held.get(matrix);
    if (!held) throw new Error("a matrix of the product is not held");
    return held;
  }

  #next(): void {
    for (;;) {
      const thread = this.#leastBusy();
      const job = this.#jobs[0];
      if (thread === null || !job) return;
      if (!job.begun && !job.wanted()) {
        this.#jobs.shift();
        this.#end(job);
        job.resolve(null);
        continue;
      }
      const rows = job.parts.shift();
      if (job.parts.length === 0) this.#jobs.shift();
      if (rows) this.#start(thread, job, rows);
      else this.#finish(job); // a result without rows has no parts
    }
  }

  #start(thread: number, job: Job, rows: Rows): void {
    this.#busy[thread] = (this.#busy[thread] ?? 0) + 1;
    job.begun = true;
    const pairs = job.product.pairs.map(([a, b]) => [place(a), place(b)] as const);
    const product = { ...job.product, pairs };
    this.#crew
      .ask(thread, (number) => ({ kind: "rows", job: number, product, rows, out: job.out }))
      .then((answer) => {
        this.#busy[thread] = (this.#busy[thread] ?? 1) - 1;
        job.left -= 1;
        if (answer.reason === null) job.compute_s += answer.compute_s;
        else job.reason = answer.reason;
        if (job.left === 0) this.#finish(job);
        this.#next();
      });
  }

  #finish(job: Job): void {
    if (job.reason) {
      this.#end(job);
      job.reject(new Error(job.reason));
      return;
    }
    const { rows, columns, out } = job.product;
    const payload = this.#memory.read(job.out, rows * columns * itemBytes(out));
    this.#end(job);
    job.resolve({ payload, compute_s: job.compute_s });
  }

  #end(job: Job): void {
    this.#memory.give(job.out);
    for (const held of job.product.pairs.flat()) {
      held.readers -= 1;
      if (held.forgotten && held.readers === 0) this.#memory.give(held.pointer);
    }
  }

  #leastBusy(): number | null {
    const least = Math.min(...this.#busy);
    return least < IN_FLIGHT ? this.#busy.indexOf(least) : null;
  }
}

/** A result's rows in parts, about two for each thread, none too small to be worth it. */
export function split(rows: number, flops: number, threads: number): Rows[] {
  const most = threads === 1 ? 1 : 2 * threads;
  const parts = Math.max(1, Math.min(most, Math.floor(flops / PART_FLOPS)));
  const height = Math.max(PART_ROWS, Math.ceil(rows / parts / PART_ROWS) * PART_ROWS);
  const made: Rows[] = [];
  for (let from = 0; from < rows; from += height) {
    made.push({ from, to: Math.min(rows, from + height) });
  }
  return made;
}

function place({ rows, columns, dtype, pointer }: Held): Placed {
  return { rows, columns, dtype, pointer };
}
