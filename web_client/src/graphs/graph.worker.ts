/**
 * The worker that runs graphs: a run of a large layer takes longer than a server waits for a sign
 * of life, so the connection is not here. ONNX Runtime starts its threads from this same script, by
 * a name that it knows.
 */

import { checkGraph } from "./graph_check";
import type { OpenGraph } from "./graph_session";
import { GraphStore } from "./graph_store";
import { onnxRuntime } from "./onnx_runtime";
import { selfTest } from "./self_test";
import type { Answer, Order } from "./worker_messages";

const THREADS_NAME = "em-pthread";

const now_s = () => performance.now() / 1000;

/** Graphs are checked before they are made ready, and what runs them before the first one. */
function checked(open: OpenGraph): OpenGraph {
  let tested: Promise<unknown> | null = null;
  return async (model) => {
    checkGraph(model);
    await (tested ??= selfTest(open));
    return open(model);
  };
}

function say(answer: Answer): void {
  postMessage(answer, answer.kind === "done" ? [answer.payload.buffer] : []);
}

async function obey(store: GraphStore, order: Exclude<Order, { kind: "start" }>): Promise<void> {
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
        seconds: await store.run(order.order),
        payload: new Uint8Array(),
      });
    case "fetch": {
      const began_s = now_s();
      const payload = store.fetch(order.order);
      return say({ kind: "done", seconds: now_s() - began_s, payload });
    }
  }
}

function serve(): void {
  let store: GraphStore | null = null;
  let last: Promise<void> = Promise.resolve();
  addEventListener("message", ({ data: order }: MessageEvent<Order>) => {
    if (order.kind === "start") {
      store = new GraphStore(checked(onnxRuntime(order.wasm, order.threads)), now_s);
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
        if (broken || !asked) say({ kind: "lost", reason: `ONNX Runtime: ${reason}` });
        else say({ kind: "failed", reason });
      });
  });
}

if (!self.name.startsWith(THREADS_NAME)) serve();
