/** Time, sockets and kernels that do what a test says. */

import type { Clock } from "../../src/device/clock";
import type { Socket } from "../../src/device/session";
import type { Done, GraphRunner } from "../../src/graphs/graph_thread";
import {
  type Kernel,
  KernelName,
  type Matrix,
  type Outcome,
  type Product,
} from "../../src/kernels/kernel";
import { multiplyPlain } from "../../src/kernels/plain";
import { decode, encode } from "../../src/protocol/codec";
import type { Message } from "../../src/protocol/messages";

/** A clock that only a test moves. */
export class FakeClock implements Clock {
  #now_s = 0;
  #waiting: { at_s: number; what: () => void }[] = [];

  now_s(): number {
    return this.#now_s;
  }

  after(seconds: number, what: () => void): () => void {
    const entry = { at_s: this.#now_s + seconds, what };
    this.#waiting.push(entry);
    return () => {
      this.#waiting = this.#waiting.filter((other) => other !== entry);
    };
  }

  /** Let so many seconds pass; whatever becomes due happens in order. */
  async pass(seconds: number): Promise<void> {
    const until_s = this.#now_s + seconds;
    for (;;) {
      await settled();
      this.#waiting.sort((a, b) => a.at_s - b.at_s);
      const next = this.#waiting[0];
      if (!next || next.at_s > until_s) break;
      this.#waiting.shift();
      this.#now_s = next.at_s;
      next.what();
    }
    this.#now_s = until_s;
    await settled();
  }
}

/** Until everything that can happen without time passing has happened. */
export async function settled(): Promise<void> {
  for (let i = 0; i < 20; i++) await Promise.resolve();
}

/** The server's end of a socket. */
export class FakeSocket implements Socket {
  bufferedAmount = 0;
  binaryType: BinaryType = "blob";
  onopen: Socket["onopen"] = null;
  onmessage: Socket["onmessage"] = null;
  onclose: Socket["onclose"] = null;
  closed = false;
  /** What the device sent. */
  readonly sent: Message[] = [];

  send(data: string | ArrayBufferLike | Blob | ArrayBufferView): void {
    this.sent.push(decode(data as Uint8Array));
  }

  close(): void {
    this.closed = true;
  }

  /** The connection is there. */
  open(): void {
    this.onopen?.call(this as never, new Event("open"));
  }

  /** The server sends a message. */
  receive(message: Message): void {
    this.receiveBytes(encode(message).buffer as ArrayBuffer);
  }

  /** The server sends what may be no message. */
  receiveBytes(data: ArrayBuffer): void {
    this.onmessage?.call(this as never, { data } as MessageEvent);
  }

  /** The connection breaks. */
  break(): void {
    this.onclose?.call(this as never, new Event("close") as CloseEvent);
  }

  /** Types of what was sent. */
  get types(): string[] {
    return this.sent.map(({ type }) => type);
  }
}

/** A kernel that computes when it is told to. */
export class FakeKernel implements Kernel {
  readonly name = KernelName.JS;
  readonly about = "a test";
  readonly held = new Set<Matrix>();
  readonly lost: Promise<string>;
  lose: (reason: string) => void = () => undefined;
  readonly #waiting: (() => void)[] = [];

  constructor() {
    this.lost = new Promise((resolve) => {
      this.lose = resolve;
    });
  }

  hold(matrix: Matrix): void {
    this.held.add(matrix);
  }

  forget(matrix: Matrix): void {
    this.held.delete(matrix);
  }

  multiply(product: Product, wanted: () => boolean): Promise<Outcome | null> {
    return new Promise((resolve) => {
      this.#waiting.push(() =>
        resolve(wanted() ? { payload: multiplyPlain(product), compute_s: 0.5 } : null),
      );
    });
  }

  /** Do all that was asked for. */
  async compute(): Promise<void> {
    for (const job of this.#waiting.splice(0)) job();
    await settled();
  }

  close(): void {
    this.#waiting.length = 0;
  }
}

/** Keeps what it is given, and makes every run wait. */
export class FakeGraphs implements GraphRunner {
  readonly kept = new Set<bigint>();
  closed = false;
  readonly lost: Promise<string>;
  lose: (reason: string) => void = () => undefined;

  constructor() {
    this.lost = new Promise((resolve) => {
      this.lose = resolve;
    });
  }

  keep(id: bigint): void {
    this.kept.add(id);
  }

  join(id: bigint, ids: readonly bigint[]): void {
    this.forget(ids);
    this.kept.add(id);
  }

  forget(ids: readonly bigint[]): void {
    for (const id of ids) this.kept.delete(id);
  }

  run(): Promise<Done | null> {
    return new Promise(() => undefined);
  }

  fetch(): Promise<Done | null> {
    return new Promise(() => undefined);
  }

  close(): void {
    this.closed = true;
  }
}
