/**
 * The operator's side of the protocol, as much as a viewer needs: hello, welcome, request, reply.
 * It connects again by itself; only a refused credential ends it.
 */

import { decode, encode } from "../protocol/codec";
import { ProtocolError } from "../protocol/errors";
import { leastWait_s } from "../protocol/coming_back";
import { VERSION } from "../protocol/limits";
import {
  ErrorCode,
  make,
  type Message,
  type MessageOf,
  type Plain,
  Role,
} from "../protocol/messages";

const FIRST_RETRY_S = 0.5;
const LONGEST_RETRY_S = 15;
/** Without an answer for this long the connection is taken for dead: networks change silently. */
const ANSWER_S = 15;

export type LinkState =
  | { readonly kind: "connecting" }
  | { readonly kind: "open" }
  | { readonly kind: "waiting"; readonly retry_s: number }
  | { readonly kind: "refused"; readonly code: string; readonly text: string };

/** The part of a WebSocket that is used. */
export interface Socket {
  binaryType: BinaryType;
  onopen: ((event: Event) => unknown) | null;
  onmessage: ((event: MessageEvent) => unknown) | null;
  onclose: ((event: CloseEvent) => unknown) | null;
  send(data: Uint8Array<ArrayBuffer>): void;
  close(): void;
}

export interface World {
  connect(url: string): Socket;
  /** Run later; the answer cancels. */
  after(seconds: number, run: () => void): () => void;
  /** 0 up to 1. */
  random(): number;
}

export interface Handlers {
  /** The state of the connection changed. */
  state(state: LinkState): void;
  /** The connection is open, or an answer has been dealt with: ask again when it is time. */
  ready(): void;
  /** What was asked for. */
  reply(data: unknown): void;
  /** The PS did not do what was asked, in its words. */
  failed(text: string): void;
}

/** Codes of `error` after which trying again is of no use. */
const FINAL_CODES: ReadonlySet<string> = new Set([
  ErrorCode.VERSION,
  ErrorCode.CREDENTIAL,
  ErrorCode.REQUEST,
  ErrorCode.PROTOCOL,
]);

export class Link {
  private socket: Socket | null = null;
  private requests = 0n;
  private failures = 0;
  private told_s = 0; // the PS said when to come back, at the soonest
  private cancelTimer: () => void = () => {};

  constructor(
    private readonly url: string,
    private readonly credential: string,
    private readonly handlers: Handlers,
    private readonly world: World,
  ) {}

  /** Connect, and again whenever the connection is lost. */
  open(): void {
    this.handlers.state({ kind: "connecting" });
    const socket = this.world.connect(this.url);
    this.socket = socket;
    socket.binaryType = "arraybuffer";
    socket.onopen = () => this.write(hello(this.credential));
    socket.onmessage = (event) => this.receive(socket, event.data);
    socket.onclose = () => this.lost(socket);
    this.expectAnswer();
  }

  /** Ask for something. One question at a time: call it when `ready` was. */
  request(action: string, args: { [name: string]: Plain }): void {
    this.requests += 1n;
    this.write({ type: "request", id: this.requests, action, arguments: args });
    this.expectAnswer();
  }

  /** Leave for good. */
  close(): void {
    this.cancelTimer();
    const socket = this.socket;
    this.socket = null;
    socket?.close();
  }

  private write(message: Message): void {
    this.socket?.send(encode(message));
  }

  private expectAnswer(): void {
    this.cancelTimer();
    const socket = this.socket;
    this.cancelTimer = this.world.after(ANSWER_S, () => {
      if (socket !== null) this.lost(socket);
    });
  }

  private receive(socket: Socket, data: unknown): void {
    if (socket !== this.socket || !(data instanceof ArrayBuffer)) return;
    try {
      this.take(decode(new Uint8Array(data)));
    } catch (error) {
      if (!(error instanceof ProtocolError)) throw error;
      this.refused(ErrorCode.PROTOCOL, `its answer cannot be read: ${error.message}`);
    }
  }

  private take(message: Message): void {
    this.cancelTimer();
    switch (message.type) {
      case "welcome":
        this.failures = 0;
        this.handlers.state({ kind: "open" });
        this.handlers.ready();
        break;
      case "reply":
        if (message.id !== this.requests) break;
        if (message.ok) this.handlers.reply(message.data);
        else this.handlers.failed(refusal(message));
        this.handlers.ready();
        break;
      case "bye":
        this.told_s = leastWait_s(message) ?? 0;
        break;
      case "error":
        this.refused(message.code, message.message, leastWait_s(message));
        break;
      default: // What a viewer has not asked for: the close that follows says it all.
        break;
    }
  }

  private refused(code: string, text: string, back_s: number | null = null): void {
    if (back_s !== null && !FINAL_CODES.has(code)) {
      this.told_s = back_s;
      return; // The close that follows makes it try again.
    }
    this.close();
    this.handlers.state({ kind: "refused", code, text });
  }

  private lost(socket: Socket): void {
    if (socket !== this.socket) return;
    this.cancelTimer();
    this.socket = null;
    socket.close();
    const longest_s = Math.min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** this.failures);
    const retry_s = this.told_s + longest_s * (0.5 + this.world.random() / 2);
    this.told_s = 0;
    this.failures += 1;
    this.handlers.state({ kind: "waiting", retry_s });
    this.cancelTimer = this.world.after(retry_s, () => this.open());
  }
}

function refusal(reply: MessageOf<"reply">): string {
  const { text } = reply.data;
  return typeof text === "string" ? text : "the server did not say why it refused";
}

function hello(credential: string): MessageOf<"hello"> {
  return make("hello", {
    role: Role.OPERATOR,
    version: VERSION,
    versions: [VERSION],
    credential,
    name: "dashboard",
  });
}
