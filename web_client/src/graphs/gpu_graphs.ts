/** Graphs on the GPU, and on the processor where the GPU does not do them, or not exactly. */

import { GraphError } from "./errors";
import {
  free,
  type GraphSession,
  type OpenGraph,
  type OpenSized,
  type Operand,
  read,
  type Sizes,
  type Value,
} from "./graph_session";

/** Micro-batches of a step have two sizes at most. */
const MOST_SIZES = 2;

/** How far GPU and processor may be apart, of the largest element: sums in another order are less. */
export const MOST_APART = 1e-4;

/** An output that is smaller than this share of the largest one is compared as if it were as large. */
const LEAST_SCALE = 0.01;

/**
 * What makes graphs ready on the GPU, at their first run with arrays of some size. That run is done
 * by the processor, too, and compared: drivers have faults that no self-test foresees.
 *
 * @param onProcessor for graphs that the GPU does not do
 * @param onGpu throws a GraphError for these
 */
export function gpuGraphs(onProcessor: OpenGraph, onGpu: OpenSized): OpenGraph {
  return async (model) => new GpuGraph(model, await onProcessor(model), onGpu);
}

/** The same without the processor: what the GPU does not do is refused. */
export function gpuAlone(onProcessor: OpenGraph, onGpu: OpenSized): OpenGraph {
  return async (model) => {
    const plain = await onProcessor(model);
    const { inputs, outputs } = plain;
    const run = () => Promise.reject(new GraphError("the GPU does not do this graph"));
    return new GpuGraph(model, { inputs, outputs, run, close: () => plain.close() }, onGpu, true);
  };
}

class GpuGraph implements GraphSession {
  readonly #ready = new Map<string, GraphSession>();
  #refused = false;

  /** @param trusted whether its first run need not be compared */
  constructor(
    private readonly model: Uint8Array,
    private readonly plain: GraphSession,
    private readonly onGpu: OpenSized,
    private readonly trusted = false,
  ) {}

  get inputs() {
    return this.plain.inputs;
  }

  get outputs() {
    return this.plain.outputs;
  }

  async run(
    given: ReadonlyMap<string, Operand>,
    wanted: readonly string[],
  ): Promise<ReadonlyMap<string, Operand>> {
    if (!this.#refused) {
      try {
        return await this.#run(given, wanted);
      } catch (error) {
        if (!(error instanceof GraphError)) throw error;
        await this.#refuse();
      }
    }
    return this.plain.run(given, wanted);
  }

  async close(): Promise<void> {
    await this.#refuse();
    await this.plain.close();
  }

  async #run(given: ReadonlyMap<string, Operand>, wanted: readonly string[]) {
    const sizes = this.#sizes(given);
    const key = JSON.stringify(sizes);
    const ready = this.#ready.get(key);
    if (ready) return ready.run(given, wanted);
    const made = await this.onGpu(this.model, sizes);
    let found: ReadonlyMap<string, Operand> = new Map();
    try {
      found = await made.run(given, wanted);
      if (!this.trusted) await refuseApart(found, await this.plain.run(given, wanted));
      await this.#keep(key, made);
      return found;
    } catch (error) {
      for (const array of found.values()) free(array);
      await made.close();
      throw error;
    }
  }

  async #keep(key: string, made: GraphSession): Promise<void> {
    for (const [old, session] of this.#ready) {
      if (this.#ready.size < MOST_SIZES) break;
      this.#ready.delete(old);
      await session.close();
    }
    this.#ready.set(key, made);
  }

  /** It is the processor's from now on. */
  async #refuse(): Promise<void> {
    this.#refused = true;
    for (const session of this.#ready.values()) await session.close();
    this.#ready.clear();
  }

  /** What the sizes are that the graph leaves open. */
  #sizes(given: ReadonlyMap<string, Operand>): Sizes {
    const sizes: { [name: string]: number } = {};
    for (const { name, shape } of this.inputs) {
      const of = given.get(name)?.shape ?? [];
      for (const [dim, size] of shape.entries()) {
        if (typeof size === "string" && of[dim] !== undefined) sizes[size] = of[dim];
      }
    }
    return sizes;
  }
}

/** @throws GraphError where outputs are further apart than rounding explains */
async function refuseApart(
  found: ReadonlyMap<string, Operand>,
  wanted: ReadonlyMap<string, Operand>,
): Promise<void> {
  const right = new Map<string, Value>();
  for (const [name, array] of wanted) right.set(name, await read(array));
  const sizes = new Map([...right].map(([name, { data }]) => [name, largest(data)]));
  // Some gradients are zero but for rounding, as that of the bias of keys: they have no own scale.
  const least = LEAST_SCALE * Math.max(...sizes.values());
  for (const [name, { data }] of right) {
    const made = found.get(name);
    const other = made && (await read(made)).data;
    if (other?.length !== data.length)
      throw new GraphError(`the GPU makes ${name} in another size`);
    let apart = 0;
    for (let n = 0; n < data.length; n++) {
      apart = Math.max(apart, Math.abs(Number(data[n]) - Number(other[n])));
    }
    const scale = Math.max(sizes.get(name)!, least);
    if (!(apart <= MOST_APART * scale)) {
      throw new GraphError(`the GPU is ${(apart / scale).toExponential(0)} off in ${name}`);
    }
  }
}

function largest(data: Value["data"]): number {
  let most = 0;
  for (let n = 0; n < data.length; n++) most = Math.max(most, Math.abs(Number(data[n])));
  return most;
}
