/** How long what threads do takes, where several do something at once. */

interface ThreadTime {
  /** What it was given and has not done. */
  given: number;
  /** The share of one thread when it began with the first of that. */
  from_s: number;
}

/**
 * Shares each moment equally among the threads that compute in it, so that all times add up to the
 * time in which any thread computed. The PS takes its sum for that, and so learns the speed of the
 * device instead of that of one thread.
 */
export class ThreadTimes {
  readonly #threads: readonly ThreadTime[];
  #busy = 0; // threads that have something to do
  #share_s = 0; // of a thread that has had something to do at every moment
  #at_s: number; // until when that is counted

  /** @param now_s a clock */
  constructor(
    count: number,
    private readonly now_s: () => number,
  ) {
    this.#threads = Array.from({ length: count }, () => ({ given: 0, from_s: 0 }));
    this.#at_s = now_s();
  }

  /** A thread is given something; it does one thing after the other. */
  given(thread: number): void {
    const time = this.#threads[thread] as ThreadTime;
    this.#count();
    if (time.given === 0) {
      this.#busy += 1;
      time.from_s = this.#share_s;
    }
    time.given += 1;
  }

  /** It has done the first of what it was given; returns the time that counts for that. */
  done(thread: number): number {
    const time = this.#threads[thread] as ThreadTime;
    this.#count();
    const took_s = this.#share_s - time.from_s;
    time.from_s = this.#share_s; // it goes on with the next
    time.given -= 1;
    if (time.given === 0) this.#busy -= 1;
    return took_s;
  }

  #count(): void {
    const now_s = this.now_s();
    if (this.#busy > 0) this.#share_s += (now_s - this.#at_s) / this.#busy;
    this.#at_s = now_s;
  }
}
