/** Which of the browser's tabs helps a server: the latest one that was started. */

/** One tab's turn. Without the browser's locks (over plain http), it never learns of other tabs. */
export class Turn {
  #end: () => void = () => undefined;

  /** @param locks what the browser offers; null where it does not */
  constructor(private readonly locks: LockManager | null) {}

  /** Take the turn as soon as the tab before has ended it, until `end`. */
  take(name: string): void {
    this.end();
    const ended = new AbortController();
    const turn = new Promise<void>((resolve) => {
      this.#end = () => {
        ended.abort();
        resolve();
      };
    });
    this.locks?.request(name, { signal: ended.signal }, () => turn).catch(() => undefined);
  }

  /** End the turn, if it was taken. */
  end(): void {
    this.#end();
  }

  /** Call `free` once no other tab has the turn; returns how to stop waiting. */
  await(name: string, free: () => void): () => void {
    const stopped = new AbortController();
    this.locks?.request(name, { signal: stopped.signal }, free).catch(() => undefined);
    return () => stopped.abort();
  }
}
