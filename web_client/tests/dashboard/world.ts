/** A network, a clock and a screen that only move when a test says so. */

import type { Socket } from "../../src/dashboard/link";
import type { PageWorld } from "../../src/dashboard/session";
import { decode, encode } from "../../src/protocol/codec";
import { make, type Message } from "../../src/protocol/messages";

export class FakeSocket implements Socket {
  binaryType: BinaryType = "blob";
  onopen: ((event: Event) => unknown) | null = null;
  onmessage: ((event: MessageEvent) => unknown) | null = null;
  onclose: ((event: CloseEvent) => unknown) | null = null;
  closed = false;
  readonly sent: Message[] = [];

  send(data: Uint8Array<ArrayBuffer>): void {
    this.sent.push(decode(data));
  }

  close(): void {
    this.closed = true;
  }

  opens(): void {
    this.onopen?.(new Event("open"));
  }

  says(message: Message): void {
    this.saysBytes(encode(message));
  }

  saysBytes(bytes: Uint8Array<ArrayBuffer>): void {
    const data = bytes.buffer;
    this.onmessage?.(new MessageEvent("message", { data }));
  }

  breaks(): void {
    this.onclose?.(new Event("close") as CloseEvent);
  }

  welcomes(): void {
    this.says(make("welcome", { device: 0n }));
  }
}

export class FakeWorld implements PageWorld {
  readonly sockets: FakeSocket[] = [];
  private time_s = 0;
  private readonly timers = new Set<{ at_s: number; run: () => void }>();
  private readonly frames: (() => void)[] = [];

  connect(): Socket {
    const socket = new FakeSocket();
    this.sockets.push(socket);
    return socket;
  }

  get socket(): FakeSocket {
    const last = this.sockets.at(-1);
    if (last === undefined) throw new Error("nobody connected");
    return last;
  }

  after(seconds: number, run: () => void): () => void {
    const timer = { at_s: this.time_s + seconds, run };
    this.timers.add(timer);
    return () => this.timers.delete(timer);
  }

  random(): number {
    return 1;
  }

  now_s(): number {
    return this.time_s;
  }

  painted(run: () => void): void {
    this.frames.push(run);
  }

  paint(): void {
    for (const run of this.frames.splice(0)) run();
  }

  /** Let time pass; timers run in order. */
  pass(seconds: number): void {
    const until_s = this.time_s + seconds;
    for (;;) {
      const due = [...this.timers].filter((timer) => timer.at_s <= until_s);
      const next = due.sort((a, b) => a.at_s - b.at_s)[0];
      if (next === undefined) break;
      this.timers.delete(next);
      this.time_s = Math.max(this.time_s, next.at_s);
      next.run();
    }
    this.time_s = until_s;
  }
}
