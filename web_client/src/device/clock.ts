/** Time, as everything that waits takes it. */
export interface Clock {
  /** Seconds that never go back. */
  now_s(): number;
  /** Call `what` once after so many seconds; returns how to call it off. */
  after(seconds: number, what: () => void): () => void;
}

/** The browser's. */
export const realClock: Clock = {
  now_s: () => performance.now() / 1000,
  after: (seconds, what) => {
    const timer = setTimeout(what, 1000 * seconds);
    return () => clearTimeout(timer);
  },
};
