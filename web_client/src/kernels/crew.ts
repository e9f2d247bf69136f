/** Threads that multiply, and the promises of what they were asked. */

import type { Answer, Order } from "./worker_messages";

/** A thread, as a Worker is one. */
export interface Thread {
  postMessage(order: Order, transfer: Transferable[]): void;
  terminate(): void;
  onmessage: ((event: MessageEvent<Answer>) => void) | null;
  onerror: ((event: ErrorEvent) => void) | null;
}

interface Asked {
  readonly resolve: (answer: Answer) => void;
}

/** Some threads, each of which does what it is told in order. */
export class Crew {
  /** Resolves with the reason if a thread dies. */
  readonly lost: Promise<string>;
  readonly #threads: Thread[];
  readonly #asked = new Map<number, Asked>();
  #jobs = 0;

  /**
   * @param count of threads
   * @param spawn starts one
   */
  constructor(count: number, spawn: () => Thread) {
    this.#threads = Array.from({ length: count }, spawn);
    this.lost = new Promise((resolve) => {
      for (const thread of this.#threads) {
        thread.onerror = (event) => resolve(event.message || "a thread that multiplies died");
        thread.onmessage = ({ data }) => {
          const asked = this.#asked.get(data.job);
          this.#asked.delete(data.job);
          asked?.resolve(data);
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
  ask(thread: number, order: (job: number) => Order): Promise<Answer> {
    this.#jobs += 1;
    const job = this.#jobs;
    return new Promise((resolve) => {
      this.#asked.set(job, { resolve });
      this.#threads[thread]?.postMessage(order(job), []);
    });
  }

  /** End all threads; nothing is answered any more. */
  close(): void {
    this.#asked.clear();
    for (const thread of this.#threads) thread.terminate();
  }
}
