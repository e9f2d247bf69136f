/** The device's side of the worker that runs its graphs. */

import type { FetchOrder, GraphOrder, Sent } from "./orders";
import type { Answer, Order } from "./worker_messages";

/** What is needed of a worker. */
export type GraphWorker = Pick<Worker, "postMessage" | "terminate" | "onmessage" | "onerror">;

/** Starts the worker and tells it to start; rejects where it cannot be loaded. */
export type StartWorker = () => Promise<GraphWorker>;

/** A run that is done: the elements of a `fetch`, and the seconds that it took. */
export interface Done {
  readonly payload: Uint8Array;
  readonly compute_s: number;
}

/** What runs graphs for a session: all of these, one after another, as they were asked for. */
export interface GraphRunner {
  keep(id: bigint, sent: Sent): void;
  join(id: bigint, ids: readonly bigint[]): void;
  forget(ids: readonly bigint[]): void;
  /**
   * Do a run; null where it is not wanted any more when its turn comes.
   *
   * @param room the bytes that it may work in when its turn comes
   * @throws Error when it cannot be done
   */
  run(order: GraphOrder, wanted: () => boolean, room: () => number): Promise<Done | null>;
  fetch(order: FetchOrder, wanted: () => boolean): Promise<Done | null>;
  /** Resolves with the reason if all that was kept is gone. */
  readonly lost: Promise<string>;
  close(): void;
}

/** Runs graphs in a worker, which is loaded when the first thing is kept. */
export class GraphThread implements GraphRunner {
  readonly lost: Promise<string>;
  #lose: (reason: string) => void = () => undefined;
  #worker: Promise<GraphWorker> | null = null;
  #last: Promise<unknown> = Promise.resolve();
  #answered: ((answer: Answer) => void) | null = null;
  #closed = false;

  constructor(private readonly start: StartWorker) {
    this.lost = new Promise((resolve) => {
      this.#lose = resolve;
    });
  }

  keep(id: bigint, sent: Sent): void {
    const { buffer } = sent.payload;
    this.#tell({ kind: "keep", id, sent }, buffer instanceof ArrayBuffer ? [buffer] : []);
  }

  join(id: bigint, ids: readonly bigint[]): void {
    this.#tell({ kind: "join", id, ids });
  }

  forget(ids: readonly bigint[]): void {
    this.#tell({ kind: "forget", ids });
  }

  run(order: GraphOrder, wanted: () => boolean, room: () => number): Promise<Done | null> {
    return this.#ask(() => ({ kind: "run", order, room_bytes: room() }), wanted);
  }

  fetch(order: FetchOrder, wanted: () => boolean): Promise<Done | null> {
    return this.#ask(() => ({ kind: "fetch", order }), wanted);
  }

  close(): void {
    this.#closed = true;
    this.#worker?.then(
      (worker) => worker.terminate(),
      () => undefined,
    );
  }

  #tell(order: Order, transfer: Transferable[] = []): void {
    this.#next(async () => (await this.#loaded()).postMessage(order, transfer)).catch(
      (error: unknown) => this.#lose(String(error)),
    );
  }

  #ask(order: () => Order, wanted: () => boolean): Promise<Done | null> {
    return this.#next(async () => {
      if (!wanted()) return null;
      const worker = await this.#loaded();
      const answer = await new Promise<Answer>((resolve) => {
        this.#answered = resolve;
        worker.postMessage(order());
      });
      if (answer.kind !== "done") throw new Error(answer.reason);
      return { payload: answer.payload, compute_s: answer.seconds };
    });
  }

  /** Do something after all that was asked for before. */
  #next<T>(what: () => Promise<T>): Promise<T> {
    const done = this.#last.then(what);
    this.#last = done.catch(() => undefined);
    return done;
  }

  #loaded(): Promise<GraphWorker> {
    this.#worker ??= this.#load();
    return this.#worker;
  }

  async #load(): Promise<GraphWorker> {
    const worker = await this.start();
    const lost = (reason: string) => {
      this.#lose(reason);
      this.#answered?.({ kind: "failed", reason });
    };
    worker.onmessage = ({ data }: MessageEvent<Answer>) => {
      if (data.kind === "lost") lost(data.reason);
      else this.#answered?.(data);
    };
    worker.onerror = (event) => lost(event.message || "the worker of graphs did not start");
    if (this.#closed) worker.terminate();
    return worker;
  }
}
