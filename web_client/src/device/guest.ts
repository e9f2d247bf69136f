/** A guest on somebody's phone: joins while it may, drains when it may not, and comes back. */

import { ErrorCode } from "../protocol/messages";
import type { Clock } from "./clock";
import { type Counts, End, type Ending } from "./session";

/** What a guest does at the moment. */
export enum State {
  /** Finding out how to multiply here. */
  STARTING = "starting",
  CONNECTING = "connecting",
  WORKING = "working",
  /** Answering what was asked, before it pauses or stops. */
  DRAINING = "draining",
  /** The owner's conditions do not allow work now. */
  PAUSED = "paused",
  /** Until the server is tried again. */
  WAITING = "waiting",
  /** It will not come back by itself. */
  ENDED = "ended",
}

/** What a guest says of itself. */
export interface Notice {
  readonly state: State;
  /** Why, for people; empty where there is nothing to say. */
  readonly reason: string;
  /** The PS's code, if it refused the device for good. */
  readonly code: string | null;
  /** Seconds until the server is tried again. */
  readonly retry_s: number | null;
  /** Whether there is no connection to the server, rather than its own word. */
  readonly lost: boolean;
}

/** A connection, as `Session` is one. */
export interface Visit {
  readonly counts: Counts;
  run(): Promise<Ending>;
  drain(): void;
  leave(reason: string): void;
  drop(reason: string): void;
}

/** How long answering what it was given may take; what is missing then goes to other devices. */
export const DRAIN_S = 30;

/** The longest wait between two tries. */
export const LONGEST_WAIT_S = 60;

/** A session this long after its welcome was a success: waits start from a second again. */
export const STEADY_S = 10;

/**
 * Seconds until the next try: between half of 1, 2, 4, ... 60 and the whole, so that a fleet does
 * not come back all at once.
 *
 * @param failures so far, since the last success
 * @param random from 0 to 1
 */
export function wait_s(failures: number, random: number): number {
  const longest_s = Math.min(LONGEST_WAIT_S, 2 ** Math.min(failures, 10));
  return longest_s * (0.5 + 0.5 * random);
}

export const NOTHING: Counts = {
  blocks: 0,
  flops: 0,
  graphs: 0,
  down_bytes: 0,
  up_bytes: 0,
  tests: 0,
};

/** Keeps a device on a server. */
export class Guest {
  #session: Visit | null = null;
  #done: Counts = NOTHING; // by sessions that are over
  #pausedFor: string | null = null;
  #stopping = false;
  #drained = false; // whether we asked the session to end
  #failures = 0;
  #welcomed_s = Infinity; // of this session; Infinity before its welcome
  #retries_at_s = 0;
  #wake: () => void = () => undefined;
  #notice: Notice = {
    state: State.CONNECTING,
    reason: "",
    code: null,
    retry_s: null,
    lost: false,
  };

  /**
   * @param connect opens a session; it calls `welcomed` of this guest
   * @param say told of every change
   * @param random numbers from 0 to 1
   */
  constructor(
    private readonly connect: () => Promise<Visit>,
    private readonly say: (notice: Notice) => void,
    private readonly clock: Clock,
    private readonly random: () => number,
  ) {}

  /** The latest of what it said, with the seconds that remain of a wait. */
  get notice(): Notice {
    const notice = this.#notice;
    if (notice.retry_s === null) return notice;
    return { ...notice, retry_s: Math.max(0, this.#retries_at_s - this.clock.now_s()) };
  }

  /** All that it did. */
  get counts(): Counts {
    return this.#session ? sum(this.#done, this.#session.counts) : this.#done;
  }

  /** Be a guest until it is stopped, refused for good, or the server is done with it. */
  async run(): Promise<void> {
    while (!this.#stopping) {
      if (this.#pausedFor !== null) {
        this.#say(State.PAUSED, this.#pausedFor);
        await this.#woken(null);
        continue;
      }
      this.#welcomed_s = Infinity;
      const ending = await this.#visit();
      if (this.clock.now_s() - this.#welcomed_s >= STEADY_S) this.#failures = 0;
      if (this.#stopping || this.#pausedFor !== null || this.#drained) continue;
      if (ending.back_s === null) {
        this.#say(State.ENDED, ending.text, ending.code);
        return;
      }
      const seconds = ending.back_s + wait_s(this.#failures, this.random());
      this.#failures += 1;
      this.#retries_at_s = this.clock.now_s() + seconds;
      this.#say(State.WAITING, ending.text, null, seconds, ending.end === End.LOST);
      await this.#woken(seconds);
    }
    this.#say(State.ENDED, "stopped");
  }

  /** The PS has welcomed the session. */
  welcomed(): void {
    this.#welcomed_s = this.clock.now_s();
    this.#say(State.WORKING, "");
  }

  /** The owner's conditions do not allow work; drain, and wait for `resume`. Twice: say why now. */
  pause(reason: string): void {
    if (this.#stopping) return;
    const already = this.#pausedFor !== null;
    this.#pausedFor = reason;
    if (already) {
      if (this.#notice.state === State.PAUSED) this.#say(State.PAUSED, reason);
      return;
    }
    this.#drain(reason);
    this.#wake();
  }

  /** They allow it again. */
  resume(): void {
    if (this.#pausedFor === null) return;
    this.#pausedFor = null;
    this.#wake();
  }

  /** Drain and end; a second time, end at once. */
  stop(): void {
    if (this.#stopping) this.#session?.leave("stopped");
    else this.#drain("stopping");
    this.#stopping = true;
    this.#wake();
  }

  /** The network is gone, which is no fault of the server. */
  offline(): void {
    this.#failures = 0;
    this.#session?.drop("the network is gone");
  }

  /** There is a network again: do not wait any longer. */
  online(): void {
    this.#failures = 0;
    if (this.#notice.state === State.WAITING) this.#wake();
  }

  async #visit(): Promise<Ending> {
    this.#say(State.CONNECTING, "");
    this.#drained = false;
    try {
      const session = await this.connect();
      this.#session = session;
      if (this.#stopping || this.#pausedFor !== null) session.leave("not now");
      const ending = await session.run();
      this.#done = this.counts;
      return ending;
    } catch (error) {
      return { end: End.REFUSED, text: String(error), code: ErrorCode.REQUEST, back_s: null };
    } finally {
      this.#session = null;
    }
  }

  #drain(reason: string): void {
    const session = this.#session;
    if (!session) return;
    this.#drained = true;
    if (this.#notice.state === State.WORKING) this.#say(State.DRAINING, reason);
    session.drain();
    this.clock.after(DRAIN_S, () => session.leave(reason));
  }

  #say(
    state: State,
    reason: string,
    code: string | null = null,
    retry_s: number | null = null,
    lost = false,
  ): void {
    this.#notice = { state, reason, code, retry_s, lost };
    this.say(this.#notice);
  }

  /** Until something changes, or so many seconds have passed. */
  #woken(seconds: number | null): Promise<void> {
    return new Promise((resolve) => {
      const cancel = seconds === null ? null : this.clock.after(seconds, () => this.#wake());
      this.#wake = () => {
        this.#wake = () => undefined;
        cancel?.();
        resolve();
      };
    });
  }
}

function sum(a: Counts, b: Counts): Counts {
  return {
    blocks: a.blocks + b.blocks,
    flops: a.flops + b.flops,
    graphs: a.graphs + b.graphs,
    down_bytes: a.down_bytes + b.down_bytes,
    up_bytes: a.up_bytes + b.up_bytes,
    tests: a.tests + b.tests,
  };
}
