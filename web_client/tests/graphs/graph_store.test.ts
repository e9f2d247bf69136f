import { describe, expect, test } from "vitest";
import { type GraphSession, type Operand, read, type Value } from "../../src/graphs/graph_session";
import { GraphStore } from "../../src/graphs/graph_store";
import { IndexType } from "../../src/graphs/orders";
import { DType } from "../../src/kernels/kernel";
import { narrow, widen } from "../../src/kernels/numbers";
import { FakeGpu } from "./fake_gpu";

/** y = x + w for x of any number of rows of two, and the sum of all. */
class Adding implements GraphSession {
  readonly inputs = [
    { name: "x", shape: ["batch", 2] },
    { name: "w", shape: [2] },
  ];
  readonly outputs = ["y", "sum"];
  closed = 0;

  async run(given: ReadonlyMap<string, Operand>, wanted: readonly string[]) {
    const [x, w] = [await this.given(given.get("x")!), await this.given(given.get("w")!)];
    if (x.type !== "float32" || w.type !== "float32") throw new Error("these are no numbers");
    const data = x.data.map((value, n) => value + w.data[n % 2]!);
    const sum = Float32Array.of(data.reduce((a, b) => a + b, 0));
    const made = new Map<string, Operand>();
    if (wanted.includes("y")) made.set("y", await this.made(x.shape, data));
    if (wanted.includes("sum")) made.set("sum", await this.made([1], sum));
    return made;
  }

  protected given(array: Operand): Promise<Value> {
    return read(array);
  }

  protected async made(shape: readonly number[], data: Float32Array): Promise<Operand> {
    return { type: "float32", shape, data };
  }

  close(): Promise<void> {
    this.closed += 1;
    return Promise.resolve();
  }
}

/** The same on a GPU, where all numbers stay that it has room for. */
class AddingOnGpu extends Adding {
  constructor(private readonly gpu: FakeGpu) {
    super();
  }

  protected override async given(array: Operand): Promise<Value> {
    const kept = "kept" in array ? await array.kept.onGpu(this.gpu.memory) : null;
    if (!kept) return read(array);
    const downloaded = this.gpu.downloaded_bytes;
    const data = await kept.read();
    this.gpu.downloaded_bytes = downloaded; // the GPU itself reads its memory
    return { type: "float32", shape: array.shape, data };
  }

  protected override async made(shape: readonly number[], data: Float32Array): Promise<Operand> {
    const uploaded = this.gpu.uploaded_bytes;
    const kept = await this.gpu.memory.make(data.length, data);
    this.gpu.uploaded_bytes = uploaded;
    return kept ? { type: "float32", shape, kept } : { type: "float32", shape, data };
  }
}

const ADDING = 1n;
const WORKING = 50; // bytes for each input

function stored(session: GraphSession = new Adding()): GraphStore {
  const store = new GraphStore(
    () => Promise.resolve(session),
    () => 0,
    () => ({ peakBytes: (given) => WORKING * given.length }),
  );
  store.keep(ADDING, { kind: "graph", payload: new Uint8Array() });
  return store;
}

function put(store: GraphStore, id: bigint, values: number[], dtype = DType.FP32): void {
  store.keep(id, { kind: "array", dtype, payload: narrow(Float32Array.from(values), dtype) });
}

function run(store: GraphStore, inputs: bigint[], outputs: bigint[], output_bytes: number[]) {
  return store.run({ run: 1n, graph: ADDING, inputs, outputs, output_bytes }, 100);
}

test("a run that needs more memory than there is is refused, and nothing is made ready", async () => {
  const store = new GraphStore(
    () => Promise.reject(new Error("it was made ready")),
    () => 0,
    () => ({ peakBytes: () => 101 }),
  );
  store.keep(ADDING, { kind: "graph", payload: new Uint8Array() });
  put(store, 2n, [1, 2]);
  await expect(run(store, [2n, 0n], [3n, 0n], [8])).rejects.toThrow(
    "101 bytes, but only 100 are free",
  );
  await expect(fetched(store, 3n, 2)).rejects.toThrow("not here");
});

async function fetched(store: GraphStore, array: bigint, items: number, out = DType.FP32) {
  const order = { run: 1n, array, first_row: 0, rows: items, columns: 1, out };
  return [...widen(await store.fetch(order), out)];
}

test.each(Object.values(DType))("a graph takes %s and keeps what it makes", async (dtype) => {
  const store = stored();
  put(store, 2n, [1, 2, 3, 4], dtype);
  await run(store, [2n, 0n], [3n, 0n], [16]); // 0: zeros, and what is not kept
  expect(await fetched(store, 3n, 4)).toEqual([1, 2, 3, 4]);
  await run(store, [3n, 0n], [0n, 4n], [4]); // an output is an input
  expect(await fetched(store, 4n, 1, DType.BF16)).toEqual([10]);
  await expect(fetched(store, 0n, 1)).rejects.toThrow("not here");
});

test("what is fetched is a copy, rounded to nearest even", async () => {
  const store = stored();
  put(store, 2n, [1 + 2 ** -8, 1 + 3 * 2 ** -8, 1e39, -0]);
  expect(await fetched(store, 2n, 4, DType.BF16)).toEqual([1, 1 + 2 ** -6, Infinity, -0]);
  const order = { run: 1n, array: 2n, first_row: 0, rows: 1, columns: 4, out: DType.FP32 };
  (await store.fetch(order)).fill(0);
  expect(await fetched(store, 2n, 1)).toEqual([1 + 2 ** -8]);
});

test("rows of arrays become one array, and the arrays are gone", async () => {
  const store = stored();
  put(store, 2n, [1, 2], DType.BF16);
  put(store, 3n, [3], DType.BF16);
  store.join(4n, [3n, 2n]);
  expect(await fetched(store, 4n, 3)).toEqual([3, 1, 2]);
  await expect(fetched(store, 2n, 1)).rejects.toThrow("not here");
  store.join(5n, [4n, 9n]);
  await expect(fetched(store, 5n, 1)).rejects.toThrow("not here");
});

describe("a run that cannot be done keeps nothing", () => {
  test.each([
    ["an output of another size", [2n, 0n], [8n, 9n], [16, 8], "an output is 4 bytes, not 8"],
    ["too few inputs", [2n], [8n, 0n], [16], "2 inputs and 2 outputs, not 1 and 2"],
    ["zeros of any size", [0n, 0n], [8n, 0n], [16], "cannot be zeros"],
    ["an array that does not fit", [3n, 0n], [8n, 0n], [16], "3 elements came"],
    ["an array that is missing", [7n, 0n], [8n, 0n], [16], "array 7 is not here"],
    ["integers for numbers", [4n, 0n], [8n, 0n], [16], "no numbers"],
  ])("%s", async (_, inputs, outputs, sizes, reason) => {
    const store = stored();
    put(store, 2n, [1, 2, 3, 4]);
    put(store, 3n, [1, 2, 3]);
    store.keep(4n, { kind: "indices", type: IndexType.INT64, payload: new Uint8Array(16) });
    await expect(run(store, inputs, outputs, sizes)).rejects.toThrow(reason);
    await expect(fetched(store, 8n, 1)).rejects.toThrow("not here");
  });
});

test.each([
  [IndexType.INT64, new BigInt64Array([0n, 7n])],
  [IndexType.BOOL, Uint8Array.of(0, 1)],
  [IndexType.UINT8, Uint8Array.of(0, 255)],
])("a graph is given %s as they came, and none are fetched", async (type, data) => {
  let given: Operand | undefined;
  const store = stored({
    ...{ inputs: [{ name: "x", shape: ["batch", 2] }], outputs: [] },
    run: (values) => {
      given = values.get("x");
      return Promise.resolve(new Map());
    },
    close: () => Promise.resolve(),
  });
  const message = Uint8Array.of(9, ...new Uint8Array(data.buffer)); // they stand anywhere in it
  store.keep(2n, { kind: "indices", type, payload: message.subarray(1) });
  await run(store, [2n], [], []);
  expect(given).toEqual({ type, shape: [1, 2], data });
  await expect(fetched(store, 2n, 2)).rejects.toThrow("has no rows");
});

test("an output replaces an input, which is lost where the run fails", async () => {
  const store = stored();
  put(store, 2n, [1, 2]);
  put(store, 4n, [10, 20]);
  await run(store, [2n, 0n], [3n, 0n], [8]);
  await run(store, [3n, 4n], [3n, 0n], [8]);
  expect(await fetched(store, 3n, 2)).toEqual([11, 22]);
  await expect(run(store, [3n, 4n], [3n, 9n], [8, 8])).rejects.toThrow("an output is 4 bytes");
  await expect(fetched(store, 3n, 2)).rejects.toThrow("what was to make it failed");
});

test.each([
  { first_row: 1, rows: 2, columns: 2 },
  { first_row: 0, rows: 1, columns: 3 },
])("there are no such rows: %o", async (part) => {
  const store = stored();
  put(store, 2n, [1, 2, 3, 4]);
  const order = { run: 1n, array: 2n, out: DType.FP32, ...part };
  await expect(store.fetch(order)).rejects.toThrow("has no rows");
});

test("a graph that is forgotten gives back what it held", async () => {
  const session = new Adding();
  const store = stored(session);
  put(store, 2n, [1, 2]);
  await run(store, [2n, 0n], [3n, 0n], [8]);
  await store.forget([ADDING, 2n]);
  expect(session.closed).toBe(1);
  await expect(run(store, [3n, 0n], [0n, 0n], [])).rejects.toThrow("graph 1 is not here");
});

describe("on a GPU", () => {
  const started = () => {
    const gpu = new FakeGpu();
    const store = stored(new AddingOnGpu(gpu));
    put(store, 2n, [1, 2], DType.BF16);
    put(store, 3n, [10, 20]);
    return { gpu, store };
  };
  const LAST_ROW = { run: 1n, first_row: 1, rows: 1, columns: 1, out: DType.FP32 };

  test("arrays that were put go there once, and only what is fetched comes back", async () => {
    const { gpu, store } = started();
    await run(store, [2n, 3n], [4n, 0n], [8]);
    for (let times = 0; times < 3; times++) await run(store, [4n, 3n], [4n, 5n], [8, 4]);
    expect(gpu.uploaded_bytes).toBe(16);
    expect(gpu.downloaded_bytes).toBe(0);
    expect(await fetched(store, 4n, 2)).toEqual([41, 82]);
    expect(await fetched(store, 5n, 1)).toEqual([123]);
    expect(gpu.downloaded_bytes).toBe(12);
    await store.fetch({ ...LAST_ROW, array: 4n });
    expect(gpu.downloaded_bytes).toBe(16);
    expect(await fetched(store, 2n, 2, DType.BF16)).toEqual([1, 2]);
  });

  test("zeros and outputs that are not kept stay there for one run", async () => {
    const { gpu, store } = started();
    await run(store, [3n, 0n], [4n, 0n], [8]);
    expect(gpu.living.size).toBe(2); // 3 and 4
    expect(gpu.uploaded_bytes).toBe(8);
    expect(await fetched(store, 4n, 2)).toEqual([10, 20]);
    await run(store, [3n, 3n], [0n, 0n], []);
    expect(gpu.living.size).toBe(2);
  });

  test("what is dropped, joined or replaced is freed there", async () => {
    const { gpu, store } = started();
    await run(store, [3n, 3n], [4n, 5n], [8, 4]);
    for (let times = 0; times < 3; times++) await run(store, [4n, 3n], [4n, 0n], [8]);
    expect(gpu.living.size).toBe(3);
    put(store, 6n, [30, 40]);
    await run(store, [6n, 6n], [0n, 0n], []);
    store.join(7n, [3n, 6n]);
    expect(gpu.living.size).toBe(2); // 4 and 5
    await run(store, [7n, 4n], [8n, 0n], [16]);
    expect(await fetched(store, 8n, 4)).toEqual([60, 120, 80, 140]);
    await store.forget([4n, 5n, 7n, 8n, ADDING]);
    expect(gpu.living.size).toBe(0);
  });

  test.each([
    ["an output of another size", [4n, 3n], [4n, 9n], [8, 8], "an output is 4 bytes, not 8"],
    ["an array that is missing", [4n, 7n], [4n, 0n], [8], "array 7 is not here"],
  ])(
    "a run that fails frees what it made and replaced: %s",
    async (...[, from, to, bytes, why]) => {
      const { gpu, store } = started();
      await run(store, [3n, 3n], [4n, 0n], [8]);
      await expect(run(store, from, to, bytes)).rejects.toThrow(why);
      await expect(fetched(store, 4n, 2)).rejects.toThrow("not here");
      expect(gpu.living.size).toBe(1); // 3
    },
  );

  test("arrays that the GPU has no room for stay with the processor", async () => {
    const { gpu, store } = started();
    gpu.room_bytes = 16;
    await run(store, [2n, 3n], [4n, 0n], [8]);
    expect(gpu.living.size).toBe(1);
    expect(await fetched(store, 4n, 2)).toEqual([11, 22]);
  });

  test("the processor runs a graph on arrays that are there", async () => {
    const gpu = new FakeGpu();
    const sessions = [new AddingOnGpu(gpu), new Adding()];
    const both = new GraphStore(
      async () => sessions.shift()!,
      () => 0,
      () => ({ peakBytes: () => 0 }),
    );
    for (const graph of [ADDING, 20n]) {
      both.keep(graph, { kind: "graph", payload: new Uint8Array() });
    }
    put(both, 2n, [1, 2], DType.BF16);
    await run(both, [2n, 2n], [4n, 0n], [8]);
    const order = { run: 2n, graph: 20n, inputs: [4n, 2n], outputs: [4n, 0n], output_bytes: [8] };
    await both.run(order, 100);
    expect(gpu.living.size).toBe(1); // 2: the output that replaces 4 is the processor's
    expect(await fetched(both, 4n, 2)).toEqual([3, 6]);
    await run(both, [4n, 2n], [4n, 0n], [8]);
    expect(await fetched(both, 4n, 2)).toEqual([4, 8]);
  });
});
