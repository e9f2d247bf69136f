import { describe, expect, test } from "vitest";
import { UnboundedError } from "../../src/graphs/graph_arrays";
import { type GivenInput, GraphMemory } from "../../src/graphs/graph_memory";
import { bytesOf, type Hex, vectors } from "../vectors";

interface RunVector {
  name: string;
  model: Hex;
  inputs: GivenInput[];
  kept: boolean[];
  peak_bytes?: number;
  refused?: string;
}

describe("graph_runs.json", () => {
  test.each(vectors<RunVector>("graph_runs.json"))("$name", (vector) => {
    const peak = () => new GraphMemory(bytesOf(vector.model)).peakBytes(vector.inputs, vector.kept);
    if (vector.peak_bytes !== undefined) {
      expect(peak()).toBe(vector.peak_bytes);
      return;
    }
    let refusal: unknown;
    try {
      peak();
    } catch (error) {
      refusal = error instanceof UnboundedError ? error.refusal : error;
    }
    expect(refusal).toBe(vector.refused);
  });
});
