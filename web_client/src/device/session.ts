/** One connection: the device core between a WebSocket and a kernel. */

import { codedResult } from "../coding/results";
import type { Done, GraphRunner } from "../graphs/graph_thread";
import type { Kernel, Matrix, Product } from "../kernels/kernel";
import { cleanText, decode, encode } from "../protocol/codec";
import { leastWait_s } from "../protocol/coming_back";
import { ProtocolError, VersionError } from "../protocol/errors";
import { HANDSHAKE_S, MAX_HEADER_BYTES, SILENCE_S, VERSION } from "../protocol/limits";
import {
  ByeCode,
  ErrorCode,
  Feature,
  make,
  type Message,
  type MessageOf,
} from "../protocol/messages";
import type { Clock } from "./clock";
import type { Action } from "./actions";
import { DeviceCore, type HeldArrays } from "./core";
import type { Probe } from "./health";

/** What a session needs of a WebSocket. */
export type Socket = Pick<
  WebSocket,
  "send" | "close" | "bufferedAmount" | "binaryType" | "onopen" | "onmessage" | "onclose"
>;

/** How a session ended. */
export enum End {
  /** The PS said goodbye, perhaps only for now. */
  BYE = "bye",
  /** The PS refused the device, or ended the session as the device's fault. */
  REFUSED = "refused",
  /** The connection is gone, or never was. */
  LOST = "lost",
  /** We closed it. */
  LEFT = "left",
}

/** How a session ended, for people, and the PS's code if it refused. */
export interface Ending {
  readonly end: End;
  readonly text: string;
  /** One of `ErrorCode`, or one that only a newer PS knows. */
  readonly code: string | null;
  /** Seconds to wait at least before coming back; null for never. */
  readonly back_s: number | null;
}

/** What a session did. */
export interface Counts {
  readonly blocks: number;
  readonly flops: number;
  /** Graphs among the blocks: layers, forward or backward. */
  readonly graphs: number;
  readonly down_bytes: number;
  readonly up_bytes: number;
  /** Arrays and answers of the PS's tests of this device, which are not among the others. */
  readonly tests: number;
}

/** What a device keeps after its connection was lost: arrays, and what runs graphs on them. */
export interface Kept {
  readonly arrays: HeldArrays;
  readonly graphs: GraphRunner;
}

/** Serves a PS over a socket until the session ends. */
export class Session {
  readonly core: DeviceCore;
  readonly #hello: MessageOf<"hello">;
  readonly #socket: Socket;
  readonly #kernel: Kernel;
  readonly #clock: Clock;
  readonly #probe: Probe;
  readonly #refused = new Map<Matrix, string>(); // by the kernel, and why
  readonly #timers = new Set<() => void>();
  #down_bytes = 0;
  #up_bytes = 0;
  #heard_s = 0; // when the PS last gave a sign of life
  #asking = false;
  #opened = false;
  #end: ((ending: Ending) => void) | null = null;
  #ended: Ending | null = null;
  #kept: Kept | null = null;

  /**
   * @param probe whether the PS is there, asked when it was silent for long
   * @param graphs what runs graphs, where `hello` names the feature; the session closes it, unless
   *   it keeps it for the next session
   * @param held what `graphs` still has from the last session
   */
  constructor(
    socket: Socket,
    kernel: Kernel,
    hello: MessageOf<"hello">,
    clock: Clock,
    probe: Probe,
    private readonly onWelcome: (welcome: MessageOf<"welcome">) => void,
    private readonly graphs: GraphRunner | null = null,
    held: HeldArrays | null = null,
  ) {
    const has = (feature: string) => graphs !== null || feature !== Feature.GRAPHS;
    this.core = new DeviceCore(hello.memory_bytes, hello.features.filter(has), held);
    this.#hello = held ? { ...hello, holds: held.of } : hello;
    this.#socket = socket;
    this.#kernel = kernel;
    this.#clock = clock;
    this.#probe = probe;
  }

  /** What it did so far. */
  get counts(): Counts {
    const { blocks, flops, graphs, tests } = this.core;
    const [down_bytes, up_bytes] = [this.#down_bytes, this.#up_bytes];
    return { blocks, flops, graphs, down_bytes, up_bytes, tests };
  }

  /** Serve until the session ends. Call it at once: the socket's events are missed else. */
  run(): Promise<Ending> {
    return new Promise<Ending>((resolve) => {
      if (this.#ended) {
        resolve(this.#ended); // it was left before it began
        return;
      }
      this.#end = resolve;
      const socket = this.#socket;
      socket.binaryType = "arraybuffer";
      socket.onopen = () => {
        this.#opened = true;
        this.#send(this.#hello);
      };
      socket.onmessage = ({ data }) => this.#receive(data);
      socket.onclose = () => this.drop(this.#closedText());
      this.#after(HANDSHAKE_S, () => {
        if (!this.core.welcome) this.drop("the server does not answer");
      });
      this.#kernel.lost.then((reason) => this.#finish(lost(`the kernel stopped: ${reason}`)));
      this.graphs?.lost.then((reason) => {
        this.forget();
        this.#finish(lost(`graphs stopped: ${reason}`));
      });
    });
  }

  /** Take nothing new, answer what is there; the PS then says bye. */
  drain(): void {
    if (this.core.welcome) this.#act(this.core.drain());
    else this.leave("stopped");
  }

  /** End it now. */
  leave(reason: string): void {
    if (this.core.welcome) {
      this.#send(make("bye", { reason: cleanText(reason), code: ByeCode.LEAVING }));
    }
    this.#finish({ end: End.LEFT, text: reason, code: null, back_s: 0 });
  }

  /** The connection is gone: do not wait until the socket notices. What may be kept is kept. */
  drop(reason: string): void {
    this.#finish(lost(reason), true);
  }

  /** Return what it keeps, for the next session, and keep it no longer; null if it keeps nothing. */
  take(): Kept | null {
    const kept = this.#kept;
    this.#kept = null;
    return kept;
  }

  /** Free what it keeps. */
  forget(): void {
    this.take()?.graphs.close();
  }

  /** Tell the PS how the device is. */
  tell(values: MessageOf<"telemetry">["values"]): void {
    if (this.core.welcome) this.#send({ type: "telemetry", values });
  }

  #receive(data: unknown): void {
    if (this.#ended) return;
    this.#heard_s = this.#clock.now_s();
    try {
      if (!(data instanceof ArrayBuffer)) throw new ProtocolError("a message is binary, not text");
      this.#down_bytes += data.byteLength;
      if (data.byteLength > MAX_HEADER_BYTES + this.#hello.memory_bytes) {
        this.#finish(lost("the server sent a message that is longer than this device takes"));
        return;
      }
      const message = decode(new Uint8Array(data));
      if (message.type === "bye") {
        const text = message.reason || "the server ended the session";
        const back_s = leastWait_s(message);
        this.#finish({ end: End.BYE, text, code: null, back_s }, !this.core.welcome);
      } else if (message.type === "error") {
        const { code, message: text } = message;
        const back_s = leastWait_s(message);
        this.#finish({ end: End.REFUSED, text, code, back_s }, !this.core.welcome);
      } else if (!this.core.welcome && message.type !== "welcome") {
        throw new ProtocolError(`a device expects no ${message.type} before its welcome`);
      } else {
        this.#act(this.core.received(message));
        if (message.type === "welcome") this.#begin(message);
      }
    } catch (error) {
      if (!(error instanceof ProtocolError)) throw error;
      const text = cleanText(error.message);
      if (error instanceof VersionError) {
        const code = ErrorCode.VERSION;
        this.#send(make("error", { code, message: text, versions: [VERSION] }));
        this.#finish({ end: End.REFUSED, text, code, back_s: null });
        return;
      }
      this.#send(make("error", { code: ErrorCode.PROTOCOL, message: text }));
      this.#finish(lost(`the server broke the protocol: ${text}`));
    }
  }

  #begin(welcome: MessageOf<"welcome">): void {
    const every_s = Math.max(0.1, welcome.heartbeat_s / 2);
    let waiting_bytes = 0;
    let moved_s = this.#clock.now_s();
    const beat = () => {
      const now_s = this.#clock.now_s();
      const waits = this.#socket.bufferedAmount; // what left since it was sent is not counted
      this.#send({ type: "heartbeat" });
      if (waits === 0 || waits < waiting_bytes) moved_s = now_s;
      waiting_bytes = waits;
      if (now_s - moved_s > SILENCE_S) {
        this.drop("the server takes nothing any more");
        return;
      }
      if (now_s - this.#heard_s > SILENCE_S) void this.#ask();
      this.#after(every_s, beat);
    };
    this.#after(every_s, beat);
    this.onWelcome(welcome);
  }

  /**
   * The PS was silent for long: it may have nothing to say, or be gone. That does not show on the
   * socket, for the system takes heartbeats as long as its own buffer has room.
   */
  async #ask(): Promise<void> {
    if (this.#asking) return;
    this.#asking = true;
    const silent_s = this.#heard_s;
    const there = await this.#probe();
    this.#asking = false;
    if (there) this.#heard_s = this.#clock.now_s();
    else if (this.#heard_s === silent_s) this.drop("the server is gone");
  }

  #act(actions: readonly Action[]): void {
    for (const action of actions) {
      switch (action.kind) {
        case "send":
          this.#send(action.message);
          break;
        case "hold":
          this.#hold(action.matrix);
          break;
        case "forget":
          if (!this.#refused.delete(action.matrix)) this.#kernel.forget(action.matrix);
          break;
        case "compute":
          this.#compute(action.run, action.product);
          break;
        case "keep":
          this.graphs?.keep(action.id, action.sent);
          break;
        case "join":
          this.graphs?.join(action.id, action.ids);
          break;
        case "discard":
          this.graphs?.forget(action.ids);
          break;
        case "graph": {
          const { order } = action;
          const room = () => this.core.memory_bytes - this.core.occupied_bytes;
          this.#answer(order.run, (wanted) => this.graphs?.run(order, wanted, room));
          break;
        }
        case "fetch": {
          const { order } = action;
          this.#answer(order.run, (wanted) => this.graphs?.fetch(order, wanted));
          break;
        }
      }
    }
  }

  #hold(matrix: Matrix): void {
    try {
      this.#kernel.hold(matrix);
    } catch (error) {
      this.#refused.set(matrix, String(error)); // told when a run names it
    }
  }

  #compute(run: bigint, product: Product): void {
    for (const matrix of product.pairs.flat()) {
      const reason = this.#refused.get(matrix);
      if (reason !== undefined) {
        this.#act(this.core.failed(run, reason));
        return;
      }
    }
    this.#answer(run, (wanted) => this.#kernel.multiply(product, wanted));
  }

  /** Do a run that may not be wanted any more when its turn comes, and answer it. */
  #answer(run: bigint, work: (wanted: () => boolean) => Promise<Done | null> | undefined): void {
    work(() => this.core.wants(run))?.then(
      (done) => {
        if (done) this.#act(this.core.computed(run, done.payload, done.compute_s));
      },
      (error: unknown) => this.#act(this.core.failed(run, said(error))),
    );
  }

  #send(message: Message): void {
    if (this.#ended || !this.#opened) return;
    const codes = message.type === "result" && this.core.codes_results;
    const bytes = encode(codes ? codedResult(message) : message);
    this.#up_bytes += bytes.length;
    this.#socket.send(bytes);
  }

  #after(seconds: number, what: () => void): void {
    const cancel = this.#clock.after(seconds, () => {
      this.#timers.delete(cancel);
      what();
    });
    this.#timers.add(cancel);
  }

  #closedText(): string {
    return this.#opened ? "the connection was lost" : "no server answers";
  }

  /** End the session. If `keeps`, keep what a later session can use. */
  #finish(ending: Ending, keeps = false): void {
    if (this.#ended) return;
    this.#ended = ending;
    for (const cancel of this.#timers) cancel();
    this.#timers.clear();
    const { graphs } = this;
    const arrays = keeps ? this.core.held : null;
    this.#act(this.core.end(arrays));
    if (graphs && arrays) this.#kept = { arrays, graphs };
    else graphs?.close();
    this.#socket.onopen = null;
    this.#socket.onmessage = null;
    this.#socket.onclose = null;
    this.#socket.close();
    this.#end?.(ending);
  }
}

function said(error: unknown): string {
  return String(error).replace(/^(?:Graph)?Error: /, "");
}

function lost(text: string): Ending {
  return { end: End.LOST, text, code: null, back_s: 0 };
}
