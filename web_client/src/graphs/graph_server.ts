/** What a worker that runs graphs does: orders in, answers out, one after another. */

import { checkGraph } from "./graph_check";
import { GraphMemory } from "./graph_memory";
import type { OpenGraph } from "./graph_session";
import { GraphStore } from "./graph_store";
import { selfTest } from "./self_test";
import type { Answer, Order, Start } from "./worker_messages";

const THREADS_NAME = "em-pthread";

const now_s = () => performance.now() / 1000;

/** A way to run graphs. */
export interface Way {
  readonly open: OpenGraph;
  /** The same for the self-test, which nothing else may pass in its place. */
  readonly tested: OpenGraph;
}

/** Graphs are checked before anything else reads them. */
function memoryOf(model: Uint8Array): GraphMemory {
  checkGraph(model);
  return new GraphMemory(model);
}

/** What runs graphs is tried before the first one. */
function tried(ways: readonly Way[]): OpenGraph {
  let exact: Promise<OpenGraph> | null = null;
  return async (model) => {
    const open = await (exact ??= firstExact(ways));
    return open(model);
  };
}

/** The first way that computes exactly; what is wrong with the last one where none does. */
async function firstExact(ways: readonly Way[]): Promise<OpenGraph> {
  let wrong: unknown = new Error("there is nothing that runs graphs");
  for (const { open, tested } of ways) {
    try {
      await selfTest(tested);
      return open;
    } catch (error) {
      wrong = error;
    }
  }
  throw wrong;
}

function say(answer: Answer): void {
  postMessage(answer, answer.kind === "done" ? [answer.payload.buffer] : []);
}

async function obey(store: GraphStore, order: Exclude<Order, Start>): Promise<void> {
  switch (order.kind) {
    case "keep":
      return store.keep(order.id, order.sent);
    case "join":
      return store.join(order.id, order.ids);
    case "forget":
      return store.forget(order.ids);
    case "run":
      return say({
        kind: "done",
        seconds: await store.run(order.order, order.room_bytes),
        payload: new Uint8Array(),
      });
    case "fetch": {
      const began_s = now_s();
      const payload = await store.fetch(order.order);
      return say({ kind: "done", seconds: now_s() - began_s, payload });
    }
  }
}

/** Tells the device that what runs graphs is of no more use. */
export type Lost = (reason: string) => void;

/**
 * Serve the device that started this worker. ONNX Runtime starts its threads from the same script,
 * by a name that it knows: they serve nobody.
 *
 * @param start makes the ways in which graphs can be run, the best first
 */
export function serveGraphs(start: (order: Start, lost: Lost) => readonly Way[]): void {
  if (self.name.startsWith(THREADS_NAME)) return;
  const lost = (reason: string) => say({ kind: "lost", reason });
  let store: GraphStore | null = null;
  let last: Promise<void> = Promise.resolve();
  addEventListener("message", ({ data: order }: MessageEvent<Order>) => {
    if (order.kind === "start") {
      store = new GraphStore(tried(start(order, lost)), now_s, memoryOf);
      return;
    }
    const held = store;
    if (!held) return;
    last = last
      .then(() => obey(held, order))
      .catch((error: unknown) => {
        const reason = error instanceof Error ? error.message : String(error);
        const asked = order.kind === "run" || order.kind === "fetch";
        const broken = error instanceof WebAssembly.RuntimeError;
        if (broken || !asked) lost(`ONNX Runtime: ${reason}`);
        else say({ kind: "failed", reason });
      });
  });
}
