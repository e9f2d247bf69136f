import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import * as onnx from "onnxruntime-web/wasm";
import { beforeAll, expect, test } from "vitest";
import { checkGraph } from "../../src/graphs/graph_check";
import {
  type GraphSession,
  type OpenGraph,
  type Operand,
  read,
  type Value,
} from "../../src/graphs/graph_session";
import { written } from "../../src/graphs/graph_writer";
import { type Onnx, onGpu, onProcessor, prepare } from "../../src/graphs/onnx_runtime";
import { LARGEST_ERROR, selfTest } from "../../src/graphs/self_test";
import { bytesOf, type Hex, vectors } from "../vectors";
import { FakeGpu } from "./fake_gpu";

let open: OpenGraph;

beforeAll(() => {
  const name = "onnxruntime-web/ort-wasm-simd-threaded.wasm";
  const wasm = readFileSync(createRequire(import.meta.url).resolve(name));
  prepare(onnx, wasm.buffer.slice(wasm.byteOffset, wasm.byteOffset + wasm.length), 1);
  open = onProcessor(onnx);
});

test("ONNX Runtime computes in the precision of fp32", async () => {
  const models: Uint8Array[] = [];
  const { error } = await selfTest((model) => {
    models.push(model);
    return open(model);
  });
  expect(error).toBeGreaterThan(0);
  expect(error).toBeLessThan(LARGEST_ERROR);
  for (const model of models) checkGraph(model);
});

test("what rounds its inputs to 16 bits does not pass", async () => {
  const rounding: OpenGraph = async (model) => {
    const session = await open(model);
    const rounded = async (array: Operand): Promise<Value> => {
      const value = await read(array);
      if (value.type !== "float32") return value;
      const data = value.data.slice();
      const bits = new Uint32Array(data.buffer);
      for (const [n, word] of bits.entries()) bits[n] = word & 0xffff_e000; // as TF32
      return { ...value, data };
    };
    return {
      ...{ inputs: session.inputs, outputs: session.outputs },
      run: async (given, wanted) => {
        const values = new Map<string, Value>();
        for (const [name, array] of given) values.set(name, await rounded(array));
        return session.run(values, wanted);
      },
      close: () => session.close(),
    } satisfies GraphSession;
  };
  await expect(selfTest(rounding)).rejects.toThrow("does not compute graphs exactly");
});

test("bytes are integers from 0 to 255, and go into inputs of their type alone", async () => {
  const { model } = vectors<{ name: string; model: Hex }>("graphs.json").find(
    ({ name }) => name === "bytes",
  )!;
  const session = await open(bytesOf(model));
  const numbers = Array.from({ length: 256 }, (_, n) => n);
  const x: Value = { type: "uint8", shape: [64, 4], data: Uint8Array.from(numbers) };
  const found = await session.run(new Map([["x", x]]), ["y", "z"]);
  expect(found.get("y")).toEqual({ ...x, type: "float32", data: Float32Array.from(numbers) });
  expect(found.get("z")).toEqual(x);
  const others: Operand[] = [found.get("y")!, { ...x, type: "bool" }];
  for (const other of others) {
    await expect(session.run(new Map([["x", other]]), ["y"])).rejects.toThrow("cannot be run");
  }
});

test("a graph's inputs have their sizes, and what it has not is refused", async () => {
  const model = (operation: string) =>
    written(
      [{ operation, inputs: ["x", "w"], outputs: ["y"] }],
      { x: ["batch", 3], w: [3] },
      { y: ["batch", 3] },
    );
  const session = await open(model("Add"));
  expect(session.inputs).toEqual([
    { name: "x", shape: ["batch", 3] },
    { name: "w", shape: [3] },
  ]);
  await expect(open(model("Nonsense"))).rejects.toThrow("ONNX Runtime refuses the graph");
  const x: Value = { type: "float32", shape: [1, 2], data: new Float32Array(2) };
  const given = new Map([
    ["x", x],
    ["w", x],
  ]);
  await expect(session.run(given, ["y"])).rejects.toThrow("the graph cannot be run");
});

/** ONNX Runtime on a GPU that does nothing, and notes where its arrays are. */
class Idle {
  readonly seen: string[] = [];
  failing = false;
  opened = 0;
  readonly env;
  readonly InferenceSession;

  constructor(device: FakeGpu) {
    this.env = { ...onnx.env, webgpu: { device } };
    this.InferenceSession = { create: async () => (this.opened++, this.#session()) };
  }

  readonly Tensor = class {
    readonly location;
    constructor(
      readonly type: string,
      readonly data: object,
      readonly dims: readonly number[],
    ) {
      this.location = data instanceof Float32Array || data instanceof BigInt64Array ? "cpu" : "gpu";
    }
    static fromGpuBuffer = (buffer: object, { dims }: { dims: readonly number[] }) =>
      new this("float32", buffer, dims);
  };

  #session() {
    const info = (name: string, type: string, shape: readonly (number | string)[]) => ({
      ...{ name, type, shape },
      isTensor: true,
    });
    return {
      inputMetadata: [info("x", "float32", ["batch", 2]), info("n", "int64", [1])],
      outputMetadata: [
        info("y", "float32", ["batch", 2]),
        info("m", "int64", [1]),
        info("z", "float32", ["rows"]),
      ],
      outputNames: ["y", "m", "z"],
      run: async (...all: { [name: string]: InstanceType<Idle["Tensor"]> | null }[]) => {
        const [feeds, fetches] = all;
        for (const [name, tensor] of Object.entries({ ...feeds, ...fetches })) {
          this.seen.push(`${name} ${tensor ? `${tensor.location} ${tensor.dims}` : "any"}`);
        }
        if (this.failing) throw new Error("a shader failed");
        return {
          y: fetches!["y"],
          m: new this.Tensor("int64", new BigInt64Array(1), [1]),
          z: new this.Tensor("float32", new Float32Array(5), [5]),
        };
      },
      release: async () => {},
    };
  }
}

test("numbers stay on the GPU, integers and what has no known size do not", async () => {
  const gpu = new FakeGpu();
  const idle = new Idle(gpu);
  const started: unknown[] = [];
  const open = onGpu(idle as unknown as Onnx, (device) => started.push(device));
  const session = await open(new Uint8Array(), { batch: 3 });
  const x = await gpu.memory.make(6, Float32Array.of(1, 2, 3, 4, 5, 6));
  const given = new Map<string, Operand>([
    ["x", { type: "float32", shape: [3, 2], kept: x! }],
    ["n", { type: "int64", shape: [1], data: new BigInt64Array(1) }],
  ]);
  const found = await session.run(given, ["y", "m", "z"]);
  expect(idle.seen).toEqual(["x gpu 3,2", "n cpu 1", "y gpu 3,2", "m any", "z any"]);
  expect(gpu.downloaded_bytes).toBe(0);
  expect(gpu.awaited).toBe(1);
  expect(found.get("y")).toMatchObject({ shape: [3, 2], kept: { elements: 6 } });
  expect(found.get("m")).toMatchObject({ type: "int64", data: new BigInt64Array(1) });
  expect(found.get("z")).toMatchObject({ shape: [5], data: new Float32Array(5) });
  await open(new Uint8Array(), { batch: 4 });
  expect(idle.opened).toBe(3); // one more keeps the device
  expect(started).toEqual([gpu]);
});

test("a run that fails on the GPU leaves its inputs there, and nothing else", async () => {
  const gpu = new FakeGpu();
  const idle = new Idle(gpu);
  const session = await onGpu(idle as unknown as Onnx)(new Uint8Array(), { batch: 1 });
  const x = await gpu.memory.make(2, Float32Array.of(1, 2));
  idle.failing = true;
  const given = new Map<string, Operand>([["x", { type: "float32", shape: [1, 2], kept: x! }]]);
  await expect(session.run(given, ["y"])).rejects.toThrow("cannot be run: a shader failed");
  expect(gpu.living.size).toBe(1);
  expect([...(await x!.read())]).toEqual([1, 2]);
});
