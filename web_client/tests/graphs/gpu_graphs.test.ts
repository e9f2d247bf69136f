import { expect, test } from "vitest";
import { GraphError } from "../../src/graphs/errors";
import { gpuAlone, gpuGraphs } from "../../src/graphs/gpu_graphs";
import {
  type GraphSession,
  type OpenSized,
  read,
  type Value,
} from "../../src/graphs/graph_session";
import { FakeGpu } from "./fake_gpu";

const MODEL = new Uint8Array([1]);

const vector = (...data: number[]): Value => ({
  type: "float32",
  shape: [data.length],
  data: Float32Array.from(data),
});

/** Something that computes y = 2 x, and notes what it does. */
function doubling(name: string, said: string[], factor = 2): GraphSession {
  return {
    inputs: [{ name: "x", shape: ["batch"] }],
    outputs: ["y"],
    run: async (given) => {
      said.push(name);
      const { data } = await read(given.get("x")!);
      return new Map([["y", vector(...[...data].map((n) => factor * Number(n)))]]);
    },
    close: async () => void said.push(`${name} closed`),
  };
}

async function run(session: GraphSession, ...x: number[]): Promise<number[]> {
  const found = await session.run(new Map([["x", vector(...x)]]), ["y"]);
  return [...((await read(found.get("y")!)).data as Float32Array)];
}

test("the first run of each size is compared with the processor's, the others are not", async () => {
  const said: string[] = [];
  const onGpu: OpenSized = async (_, { batch }) => doubling(`gpu ${batch}`, said);
  const session = await gpuGraphs(async () => doubling("processor", said), onGpu)(MODEL);
  expect(await run(session, 1, 2)).toEqual([2, 4]);
  expect(await run(session, 3, 4)).toEqual([6, 8]);
  expect(await run(session, 5)).toEqual([10]);
  expect(said).toEqual(["gpu 2", "processor", "gpu 2", "gpu 1", "processor"]);
  await session.close();
  expect(said.slice(5).sort()).toEqual(["gpu 1 closed", "gpu 2 closed", "processor closed"]);
});

test("two sizes are ready at once, the older one makes room", async () => {
  const said: string[] = [];
  const onGpu: OpenSized = async (_, { batch }) => doubling(`gpu ${batch}`, said);
  const session = await gpuGraphs(async () => doubling("processor", []), onGpu)(MODEL);
  await run(session, 1);
  await run(session, 1, 2);
  await run(session, 1, 2, 3);
  expect(said).toEqual(["gpu 1", "gpu 2", "gpu 3", "gpu 1 closed"]);
});

test.each([
  ["wrong", async () => doubling("gpu", [], 2.001)],
  ["not a number", async () => doubling("gpu", [], NaN)],
  ["lacking an operation", () => Promise.reject(new GraphError("no Scan"))],
])("what the GPU gets %s is the processor's", async (_, onGpu: OpenSized) => {
  const said: string[] = [];
  const session = await gpuGraphs(async () => doubling("processor", said), onGpu)(MODEL);
  expect(await run(session, 1, 2)).toEqual([2, 4]);
  said.length = 0;
  expect(await run(session, 3)).toEqual([6]);
  expect(said).toEqual(["processor"]); // the GPU is not asked again
});

test("an output that is zero but for rounding is compared by the scale of the others", async () => {
  const two = (small: number, said: string[]): GraphSession => ({
    inputs: [{ name: "x", shape: ["batch"] }],
    outputs: ["sum", "bias"],
    run: async () => {
      said.push("run");
      return new Map([
        ["sum", vector(1, -3)],
        ["bias", vector(small)],
      ]);
    },
    close: async () => undefined,
  });
  for (const [small, times] of [
    [2e-7, 1], // compared once
    [2e-5, 3], // compared, and then done each time
  ] as const) {
    const said: string[] = [];
    const session = await gpuGraphs(
      async () => two(1e-9, said),
      async () => two(small, []),
    )(MODEL);
    const given = new Map([["x", vector(1)]]);
    await session.run(given, session.outputs);
    await session.run(given, session.outputs);
    expect(said.length, `${small}`).toBe(times);
  }
});

test("without the processor what the GPU lacks is refused", async () => {
  const lacking: OpenSized = () => Promise.reject(new GraphError("no Scan"));
  const alone = await gpuAlone(async () => doubling("processor", []), lacking)(MODEL);
  await expect(run(alone, 1)).rejects.toThrow("the GPU does not do this graph");
});

test("a fault that is none of the graph's passes through", async () => {
  const broken: OpenSized = () => Promise.reject(new WebAssembly.RuntimeError("out of bounds"));
  const session = await gpuGraphs(async () => doubling("processor", []), broken)(MODEL);
  await expect(run(session, 1)).rejects.toThrow("out of bounds");
});

test.each([
  [2, 1],
  [2.001, 0], // refused
])(
  "outputs on the GPU are compared, and those that are refused are freed",
  async (factor, left) => {
    const gpu = new FakeGpu();
    const onGpu: OpenSized = async () => ({
      ...doubling("gpu", []),
      run: async (given) => {
        const x = (await read(given.get("x")!)).data as Float32Array;
        const kept = await gpu.memory.make(
          x.length,
          x.map((n) => factor * n),
        );
        return new Map([["y", { type: "float32", shape: [x.length], kept: kept! }]]);
      },
    });
    const session = await gpuGraphs(async () => doubling("processor", []), onGpu)(MODEL);
    expect(await run(session, 1, 2)).toEqual([2, 4]);
    expect(gpu.living.size).toBe(left);
  },
);
