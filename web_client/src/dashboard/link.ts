/**
 * The operator's side of the protocol, as much as a viewer needs: hello, welcome, request, reply.
 * It connects again by itself; only a refused credential ends it.
 */

import { decode, encode } from "@msgpack/msgpack";

const VERSION = 1;
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
const FINAL_CODES = new Set(["version", "credential", "request", "protocol"]);

export class Link {
  private socket: Socket | null = null;
  private requests = 0;
  private failures = 0;
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
    socket.onopen = () =>
      this.write("hello", {
        role: "operator",
        version: VERSION,
        credential: this.credential,
        name: "dashboard",
      });
    socket.onmessage = (event) => this.receive(socket, event.data);
    socket.onclose = () => this.lost(socket);
    this.expectAnswer();
  }

  /** Ask for something. One question at a time: call it when `ready` was. */
  request(action: string, args: Record<string, unknown>): void {
    this.requests += 1;
    this.write("request", { id: this.requests, action, arguments: args });
    this.expectAnswer();
  }

  /** Leave for good. */
  close(): void {
    this.cancelTimer();
    const socket = this.socket;
    this.socket = null;
    socket?.close();
  }

  private write(type: string, fields: Record<string, unknown>): void {
    this.socket?.send(encode([type, fields]));
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
    const [type, value] = decode(data) as [string, Record<string, unknown>];
    this.cancelTimer();
    switch (type) {
      case "welcome":
        this.failures = 0;
        this.handlers.state({ kind: "open" });
        this.handlers.ready();
        break;
      case "reply":
        if (value.id !== this.requests) break;
        if (value.ok === true) this.handlers.reply(value.data);
        else this.handlers.failed(refusal(value.data));
        this.handlers.ready();
        break;
      case "error":
        this.refused(String(value.code ?? ""), String(value.message ?? ""));
        break;
      default: // `bye`, and what a viewer has not asked for: the close that follows says it all.
        break;
    }
  }

  private refused(code: string, text: string): void {
    if (!FINAL_CODES.has(code)) return; // The close that follows makes it try again.
    this.close();
    this.handlers.state({ kind: "refused", code, text });
  }

  private lost(socket: Socket): void {
    if (socket !== this.socket) return;
    this.cancelTimer();
    this.socket = null;
    socket.close();
    const longest_s = Math.min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** this.failures);
    const retry_s = longest_s * (0.5 + this.world.random() / 2);
    this.failures += 1;
    this.handlers.state({ kind: "waiting", retry_s });
    this.cancelTimer = this.world.after(retry_s, () => this.open());
  }
}

function refusal(data: unknown): string {
  const text = (data as { text?: unknown } | null)?.text;
  return typeof text === "string" ? text : "the server did not say why it refused";
}
