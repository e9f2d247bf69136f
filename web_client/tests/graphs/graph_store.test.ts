import { describe, expect, test } from "vitest";
import type { GraphSession, Value } from "../../src/graphs/graph_session";
import { GraphStore } from "../../src/graphs/graph_store";
import { IndexType } from "../../src/graphs/orders";
import { DType } from "../../src/kernels/kernel";
import { narrow, widen } from "../../src/kernels/numbers";

/** y = x + w for x of any number of rows of two, and the sum of all. */
class Adding implements GraphSession {
  readonly inputs = [
    { name: "x", shape: ["batch", 2] },
    { name: "w", shape: [2] },
  ];
  readonly outputs = ["y", "sum"];
  closed = 0;

  run(given: ReadonlyMap<string, Value>): Promise<ReadonlyMap<string, Value>> {
    const [x, w] = [given.get("x"), given.get("w")];
    if (x?.type !== "float32" || w?.type !== "float32") throw new Error("these are no numbers");
    const data = x.data.map((value, n) => value + w.data[n % 2]!);
    const sum = Float32Array.of(data.reduce((a, b) => a + b, 0));
    return Promise.resolve(
      new Map<string, Value>([
        ["y", { type: "float32", shape: x.shape, data }],
        ["sum", { type: "float32", shape: [1], data: sum }],
      ]),
    );
  }

  close(): Promise<void> {
    this.closed += 1;
    return Promise.resolve();
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
  await expect(run(store, [2n, 0n], [3n, 0n], [8])).rejects.toThrow("101 bytes and 100 are free");
  expect(() => fetched(store, 3n, 2)).toThrow("not here");
});

function fetched(store: GraphStore, array: bigint, items: number, out = DType.FP32): number[] {
  const order = { run: 1n, array, first_row: 0, rows: items, columns: 1, out };
  return [...widen(store.fetch(order), out)];
}

test.each(Object.values(DType))("a graph takes %s and keeps what it makes", async (dtype) => {
  const store = stored();
  put(store, 2n, [1, 2, 3, 4], dtype);
  await run(store, [2n, 0n], [3n, 0n], [16]); // 0: zeros, and what is not kept
  expect(fetched(store, 3n, 4)).toEqual([1, 2, 3, 4]);
  await run(store, [3n, 0n], [0n, 4n], [4]); // an output is an input
  expect(fetched(store, 4n, 1, DType.BF16)).toEqual([10]);
  expect(() => fetched(store, 0n, 1)).toThrow("not here");
});

test("what is fetched is a copy, rounded to nearest even", () => {
  const store = stored();
  put(store, 2n, [1 + 2 ** -8, 1 + 3 * 2 ** -8, 1e39, -0]);
  expect(fetched(store, 2n, 4, DType.BF16)).toEqual([1, 1 + 2 ** -6, Infinity, -0]);
  store.fetch({ run: 1n, array: 2n, first_row: 0, rows: 1, columns: 4, out: DType.FP32 }).fill(0);
  expect(fetched(store, 2n, 1)).toEqual([1 + 2 ** -8]);
});

test("rows of arrays become one array, and the arrays are gone", () => {
  const store = stored();
  put(store, 2n, [1, 2], DType.BF16);
  put(store, 3n, [3], DType.BF16);
  store.join(4n, [3n, 2n]);
  expect(fetched(store, 4n, 3)).toEqual([3, 1, 2]);
  expect(() => fetched(store, 2n, 1)).toThrow("not here");
  store.join(5n, [4n, 9n]);
  expect(() => fetched(store, 5n, 1)).toThrow("not here");
});

describe("a run that cannot be done keeps nothing", () => {
  test.each([
    ["an output of another size", [2n, 0n], [8n, 9n], [16, 8], "an output has 4 bytes, not 8"],
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
    expect(() => fetched(store, 8n, 1)).toThrow("not here");
  });
});

test.each([
  [IndexType.INT64, new BigInt64Array([0n, 7n])],
  [IndexType.BOOL, Uint8Array.of(0, 1)],
  [IndexType.UINT8, Uint8Array.of(0, 255)],
])("a graph is given %s as they came, and none are fetched", async (type, data) => {
  let given: Value | undefined;
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
  expect(() => fetched(store, 2n, 2)).toThrow("has no rows");
});

test("an output replaces an input, which is lost where the run fails", async () => {
  const store = stored();
  put(store, 2n, [1, 2]);
  put(store, 4n, [10, 20]);
  await run(store, [2n, 0n], [3n, 0n], [8]);
  await run(store, [3n, 4n], [3n, 0n], [8]);
  expect(fetched(store, 3n, 2)).toEqual([11, 22]);
  await expect(run(store, [3n, 4n], [3n, 9n], [8, 8])).rejects.toThrow("an output has 4 bytes");
  expect(() => fetched(store, 3n, 2)).toThrow("what was to make it failed");
});

test.each([
  { first_row: 1, rows: 2, columns: 2 },
  { first_row: 0, rows: 1, columns: 3 },
])("there are no such rows: %o", (part) => {
  const store = stored();
  put(store, 2n, [1, 2, 3, 4]);
  const order = { run: 1n, array: 2n, out: DType.FP32, ...part };
  expect(() => store.fetch(order)).toThrow("has no rows");
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
