import { describe, expect, test } from "vitest";
import type { Action } from "../../src/device/actions";
import { DeviceCore, type HeldArrays } from "../../src/device/core";
import { decode, encode } from "../../src/protocol/codec";
import { ProtocolError } from "../../src/protocol/errors";
import { make, type Message } from "../../src/protocol/messages";
import { bytesOf, type Hex, vectors } from "../vectors";

interface Received {
  type: string;
  fields: Record<string, unknown>;
  payload?: Hex;
}

interface FaultVector {
  name: string;
  feature?: string;
  memory_bytes: number;
  receive: Received[];
  answer: "task_error" | "error" | "none";
}

const WELCOME = make("welcome", { device: 1n });

function messageOf({ type, fields, payload }: Received): Message {
  const ids = ([key, value]: [string, unknown]): [string, unknown] => {
    if (["id", "device", "graph", "array"].includes(key)) return [key, BigInt(value as number)];
    if (["ids", "inputs", "outputs"].includes(key)) return [key, (value as number[]).map(BigInt)];
    return [key, value];
  };
  const message = { type, ...Object.fromEntries(Object.entries(fields).map(ids)) };
  const whole = payload === undefined ? message : { ...message, payload: bytesOf(payload) };
  return decode(encode(whole as Message));
}

function welcomed(memory_bytes: number, features: string[] = []): DeviceCore {
  const core = new DeviceCore(memory_bytes, features);
  core.received({ ...WELCOME, features });
  return core;
}

function put(id: bigint, rows: number, columns: number): Message {
  const payload = new Uint8Array(rows * columns * 4);
  return { type: "put", id, rows, columns, dtype: "fp32", payload };
}

function run(id: bigint, inputs: bigint[]): Message {
  return {
    type: "run",
    id,
    op: "matmul",
    inputs,
    transpose_a: false,
    transpose_b: false,
    out: "fp32",
  };
}

function kinds(actions: Action[]): string[] {
  return actions.map((action) => (action.kind === "send" ? action.message.type : action.kind));
}

describe("faults.json", () => {
  test.each(vectors<FaultVector>("faults.json"))("$name", (vector) => {
    const { memory_bytes, receive, answer, feature } = vector;
    const core = welcomed(memory_bytes, feature === undefined ? [] : [feature]);
    for (const message of receive.slice(0, -1)) core.received(messageOf(message));
    const last = messageOf(receive.at(-1) as Received);
    if (answer === "error") expect(() => core.received(last)).toThrow(ProtocolError);
    else expect(kinds(core.received(last)).includes("task_error")).toBe(answer === "task_error");
  });
});

test("a run is computed once and answered once", () => {
  const core = welcomed(1000);
  expect(kinds(core.received(put(1n, 2, 3)))).toEqual(["hold"]);
  expect(kinds(core.received(put(2n, 3, 4)))).toEqual(["hold"]);
  const [action] = core.received(run(5n, [1n, 2n]));
  expect(action?.kind === "compute" && action.product.columns).toBe(4);
  expect(core.occupied_bytes).toBe(24 + 48 + 32);
  expect(core.idle).toBe(false);
  expect(kinds(core.computed(5n, new Uint8Array(32), 0.5))).toEqual(["result"]);
  expect(core.computed(5n, new Uint8Array(32), 0.5)).toEqual([]);
  expect([core.blocks, core.flops, core.idle]).toEqual([1, 48, true]);
});

test("the server's tests are no work", () => {
  const core = welcomed(1000);
  const first = 2n ** 52n;
  core.received(put(first, 2, 2));
  core.received(run(first + 1n, [first, first]));
  expect([core.busy, core.idle]).toEqual([false, false]);
  core.computed(first + 1n, new Uint8Array(16), 0);
  expect([core.tests, core.blocks, core.flops]).toEqual([2, 0, 0]);
  core.received(put(1n, 2, 2));
  core.received(run(2n, [1n, 1n]));
  expect(core.busy).toBe(true);
});

test("a cancelled run is not answered, and its memory is free", () => {
  const core = welcomed(1000);
  core.received(put(1n, 2, 2));
  core.received(run(1n, [1n, 1n]));
  core.received({ type: "cancel", ids: [1n, 9n] });
  expect(core.wants(1n)).toBe(false);
  expect(core.occupied_bytes).toBe(16);
  expect(core.computed(1n, new Uint8Array(16), 0)).toEqual([]);
  expect(core.failed(1n, "too late")).toEqual([]);
  expect(core.blocks).toBe(0);
});

test("what is dropped is forgotten once", () => {
  const core = welcomed(1000);
  core.received(put(2n ** 62n, 2, 2));
  expect(kinds(core.received({ type: "drop", ids: [2n ** 62n, 3n] }))).toEqual(["forget"]);
  expect(kinds(core.received({ type: "drop", ids: [2n ** 62n] }))).toEqual([]);
  expect(core.occupied_bytes).toBe(0);
});

test("a failure is told and gives the memory back", () => {
  const core = welcomed(1000);
  core.received(put(1n, 2, 2));
  core.received(run(1n, [1n, 1n]));
  expect(kinds(core.failed(1n, "the GPU is gone"))).toEqual(["task_error"]);
  expect(core.occupied_bytes).toBe(16);
});

test("draining is said once, and runs are still answered", () => {
  const core = welcomed(1000);
  core.received(put(1n, 2, 2));
  core.received(run(1n, [1n, 1n]));
  expect(kinds(core.drain())).toEqual(["drain"]);
  expect(kinds(core.drain())).toEqual([]);
  expect(kinds(core.computed(1n, new Uint8Array(16), 0))).toEqual(["result"]);
});

describe("arrays from before", () => {
  const features = ["graphs", "keeps"];
  const bytes = 16;

  function working(arrays = "A", held: HeldArrays | null = null): DeviceCore {
    const core = new DeviceCore(1000, features, held);
    core.received({ ...WELCOME, features, arrays });
    return core;
  }

  function graph(id: bigint): Message {
    return { type: "graph", id, products: "", payload: new Uint8Array(10) };
  }

  function runGraph(id: bigint, inputs: bigint[], outputs: bigint[]): Message {
    const output_bytes = outputs.map(() => bytes);
    return { type: "run_graph", id, graph: 1n, inputs, outputs, output_bytes, flops: 1 };
  }

  /** A graph and an array, of which only graphs know. */
  function withGraph(): DeviceCore {
    const core = working();
    core.received(graph(1n));
    core.received(put(2n, 2, 2));
    return core;
  }

  function idsOf(held: HeldArrays | null): bigint[] {
    return [...(held?.store.keys() ?? [])].sort((a, b) => Number(a - b));
  }

  test("of outputs, only those that their runs have made are kept", () => {
    const core = withGraph();
    const made = (run: bigint, inputs: bigint[], output: bigint) => {
      core.received(runGraph(run, inputs, [output]));
      core.computed(run, new Uint8Array(), 0);
    };
    made(1n, [2n], 10n);
    made(2n, [2n], 11n);
    made(3n, [2n], 12n);
    made(4n, [10n], 10n); // in its place
    core.received(runGraph(5n, [11n], [11n])); // not answered
    core.received(runGraph(6n, [2n], [13n]));
    core.failed(6n, "not enough memory");
    core.received(runGraph(7n, [2n], [14n]));
    core.received({ type: "cancel", ids: [7n] });
    core.received(runGraph(8n, [12n, 99n], [12n])); // cannot be run
    expect(idsOf(core.held)).toEqual([1n, 2n, 10n]);
    const actions = core.end(core.held);
    expect(actions).toEqual([{ kind: "discard", ids: [11n, 12n, 13n, 14n] }]);
    expect(core.occupied_bytes).toBe(0);
  });

  test("they are there in the next session, if the PS still knows them", () => {
    const before = withGraph();
    before.received(runGraph(1n, [2n], [3n]));
    before.computed(1n, new Uint8Array(), 0);
    const core = new DeviceCore(1000, features, before.held);
    expect(core.held).toEqual(before.held);
    const said = core.received({ ...WELCOME, features, arrays: "A" });
    expect(said).toEqual([{ kind: "send", message: { type: "held", ids: [1n, 2n, 3n] } }]);
    expect(core.occupied_bytes).toBe(10 + 16 + bytes);
    expect(kinds(core.received(runGraph(1n, [2n, 3n], [4n])))).toEqual(["graph"]);
    expect(kinds(core.received({ type: "drop", ids: [2n, 3n] }))).toEqual(["discard"]);
  });

  test.each<[string, string, string[]]>([
    ["another name", "B", features],
    ["no name", "", features],
    ["no such feature", "A", ["graphs"]],
  ])("they are dropped where welcome has %s", (_, arrays, has) => {
    const before = withGraph();
    before.received(runGraph(1n, [2n], [3n]));
    before.computed(1n, new Uint8Array(), 0);
    const core = new DeviceCore(1000, features, before.held);
    const actions = core.received({ ...WELCOME, features: has, arrays });
    expect(actions).toEqual([{ kind: "discard", ids: [1n, 2n, 3n] }]);
    expect(core.occupied_bytes).toBe(0);
    expect(kinds(core.received(graph(1n)))).toEqual(["keep"]);
  });

  test("nothing is kept without a graph, a name, or the feature, nor while draining", () => {
    const draining = withGraph();
    draining.drain();
    const plain = welcomed(1000, ["graphs"]);
    const nameless = working("");
    for (const core of [plain, nameless]) core.received(graph(1n));
    const empty = working();
    empty.received(put(2n, 2, 2));
    for (const core of [draining, plain, nameless, empty]) expect(core.held).toBeNull();
  });

  test("an array that only a kernel has is not kept", () => {
    const core = withGraph();
    core.received(put(3n, 2, 2));
    core.received(run(1n, [3n, 3n]));
    expect(idsOf(core.held)).toEqual([1n, 2n]);
    expect(kinds(core.end(core.held))).toEqual(["forget"]);
  });
});
