import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import * as onnx from "onnxruntime-web/wasm";
import { beforeAll, expect, test } from "vitest";
import { checkGraph } from "../../src/graphs/graph_check";
import type { GraphSession, OpenGraph, Value } from "../../src/graphs/graph_session";
import { written } from "../../src/graphs/graph_writer";
import { onProcessor, prepare } from "../../src/graphs/onnx_runtime";
import { LARGEST_ERROR, selfTest } from "../../src/graphs/self_test";
import { bytesOf, type Hex, vectors } from "../vectors";

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
    const rounded = (value: Value): Value => {
      if (value.type !== "float32") return value;
      const data = value.data.slice();
      const bits = new Uint32Array(data.buffer);
      for (const [n, word] of bits.entries()) bits[n] = word & 0xffff_e000; // as TF32
      return { ...value, data };
    };
    return {
      ...{ inputs: session.inputs, outputs: session.outputs },
      run: (given, wanted) =>
        session.run(new Map([...given].map(([name, of]) => [name, rounded(of)])), wanted),
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
  const others: Value[] = [found.get("y")!, { ...x, type: "bool" }];
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
