import { describe, expect, test } from "vitest";
import type { Action } from "../../src/device/actions";
import { DeviceCore } from "../../src/device/core";
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
