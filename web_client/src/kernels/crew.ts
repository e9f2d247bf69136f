/** Threads that multiply, and the promises of what they were asked. */

import { ThreadTimes } from "./thread_times";
import type { Answer, Order } from "./worker_messages";

/** A thread, as a Worker is one. */
export interface Thread {
  postMessage(order: Order, transfer: Transferable[]): void;
  terminate(): void;
  onmessage: ((event: MessageEvent<Answer>) => void) | null;
  onerror: ((event: ErrorEvent) => void) | null;
}

/** An answer, and its share of the time in which any thread computed. */
export type Timed = Answer & { readonly compute_s: number };

interface Asked {
  readonly thread: number;
  readonly resolve: (answer: Timed) => void;
}

/** Some threads, each of which does what it is told in order. */
export class Crew {
  /** Resolves with the reason if a thread dies. */
  readonly lost: Promise<string>;
  readonly #threads: Thread[];
  readonly #asked = new Map<number, Asked>();
  readonly #times: ThreadTimes;
  #jobs = 0;

  /**
   * @param count of threads
   * @param spawn starts one
   * @param now_s a clock
   */
  constructor(count: number, spawn: () => Thread, now_s: () => number) {
    this.#times = new ThreadTimes(count, now_s);
    this.#threads = Array.from({ length: count }, spawn);
    this.lost = new Promise((resolve) => {
      for (const thread of this.#threads) {
        thread.onerror = (event) => resolve(event.message || "a thread that multiplies died");
        thread.onmessage = ({ data }) => {
          const asked = this.#asked.get(data.job);
          if (!asked) return;
          this.#asked.delete(data.job);
          asked.resolve({ ...data, compute_s: this.#times.done(asked.thread) });
        };
      }
    });
  }

  /** How many threads there are. */
  get size(): number {
    return this.#threads.length;
  }

  /** Tell a thread something that it does not answer. */
  tell(thread: number, order: Order): void {
    this.#threads[thread]?.postMessage(order, []);
  }

  /** Ask a thread for something; `order` makes the message for the number of the job. */
  ask(thread: number, order: (job: number) => Order): Promise<Timed> {
    this.#jobs += 1;
    const job = this.#jobs;
    return new Promise((resolve) => {
      this.#asked.set(job, { thread, resolve });
      this.#times.given(thread);
      this.#threads[thread]?.postMessage(order(job), []);
    });
  }

  /** End all threads; nothing is answered any more. */
  close(): void {
    this.#asked.clear();
    for (const thread of this.#threads) thread.terminate();
  }
}
