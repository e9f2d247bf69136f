/** Threads with matrices of their own: plain JavaScript, or WASM where memory cannot be shared. */

import type { Crew } from "./crew";
import {
  flopsOf,
  type Kernel,
  type KernelName,
  type Matrix,
  type Outcome,
  type Product,
} from "./kernel";
import type { Named, Order } from "./worker_messages";

/** Products that a thread is given before the first of them is done. */
const IN_FLIGHT = 2;

interface Held {
  readonly named: Named;
  readonly payload: Uint8Array;
  readonly threads: Set<number>;
  forgotten: boolean;
}

/** What a thread has to do. */
interface Busy {
  products: number;
  flops: number;
}

interface Waiting {
  readonly product: Product;
  readonly held: readonly (readonly [Held, Held])[];
  readonly wanted: () => boolean;
  readonly resolve: (outcome: Outcome | null) => void;
  readonly reject: (reason: unknown) => void;
}

/** Each product is one thread's; a thread is sent a matrix when it first needs it. */
export class OwnPool implements Kernel {
  readonly lost: Promise<string>;
  readonly #crew: Crew;
  readonly #held = new Map<Matrix, Held>();
  readonly #waiting: Waiting[] = [];
  readonly #busy: Busy[];
  #keys = 0;

  /**
   * @param start tells each thread what kind of store it has
   */
  constructor(
    readonly name: KernelName,
    readonly about: string,
    crew: Crew,
    start: Order,
  ) {
    this.#crew = crew;
    this.lost = crew.lost;
    this.#busy = Array.from({ length: crew.size }, () => ({ products: 0, flops: 0 }));
    for (let thread = 0; thread < crew.size; thread++) crew.tell(thread, start);
  }

  hold(matrix: Matrix): void {
    this.#keys += 1;
    const { rows, columns, dtype, payload } = matrix;
    const named = { key: this.#keys, rows, columns, dtype };
    this.#held.set(matrix, { named, payload, threads: new Set(), forgotten: false });
  }

  forget(matrix: Matrix): void {
    const held = this.#held.get(matrix);
    if (!held) return;
    this.#held.delete(matrix);
    held.forgotten = true;
    this.#dismiss(held);
  }

  multiply(product: Product, wanted: () => boolean): Promise<Outcome | null> {
    const find = (matrix: Matrix) => {
      const held = this.#held.get(matrix);
      if (!held) throw new Error("a matrix of the product is not held");
      return held;
    };
    return new Promise((resolve, reject) => {
      const held = product.pairs.map(([a, b]) => [find(a), find(b)] as const);
      this.#waiting.push({ product, held, wanted, resolve, reject });
      this.#next();
    });
  }

  close(): void {
    this.#waiting.length = 0;
    this.#crew.close();
  }

  #next(): void {
    for (;;) {
      const thread = this.#leastBusy();
      if (thread === null) return;
      const job = this.#waiting.shift();
      if (!job) return;
      if (job.wanted()) this.#start(thread, job);
      else job.resolve(null);
    }
  }

  #start(thread: number, { product, held, resolve, reject }: Waiting): void {
    for (const matrix of held.flat()) {
      if (matrix.threads.has(thread)) continue;
      matrix.threads.add(thread);
      this.#crew.tell(thread, { kind: "hold", matrix: matrix.named, payload: matrix.payload });
    }
    const pairs = held.map(([a, b]) => [a.named, b.named] as const);
    const named = { ...product, pairs };
    const flops = flopsOf(product);
    const busy = this.#busy[thread] as Busy;
    busy.products += 1;
    busy.flops += flops;
    const asked = this.#crew.ask(thread, (job) => ({ kind: "multiply", job, product: named }));
    this.#forgetAgain(held);
    asked.then((answer) => {
      busy.products -= 1;
      busy.flops -= flops;
      if (answer.reason === null && answer.payload) {
        resolve({ payload: answer.payload, compute_s: answer.compute_s });
      } else {
        reject(new Error(answer.reason ?? "a thread answered without a result"));
      }
      this.#next();
    });
  }

  /** What was forgotten while a product of it waited had to be sent all the same. */
  #forgetAgain(held: readonly (readonly [Held, Held])[]): void {
    for (const matrix of held.flat()) if (matrix.forgotten) this.#dismiss(matrix);
  }

  #dismiss(held: Held): void {
    for (const thread of held.threads) {
      this.#crew.tell(thread, { kind: "forget", key: held.named.key });
    }
    held.threads.clear();
  }

  #leastBusy(): number | null {
    let least: number | null = null;
    for (const [thread, { products, flops }] of this.#busy.entries()) {
      if (products >= IN_FLIGHT) continue;
      if (least === null || flops < (this.#busy[least]?.flops ?? 0)) least = thread;
    }
    return least;
  }
}
