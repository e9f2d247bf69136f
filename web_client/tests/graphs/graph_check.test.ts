import { describe, expect, test } from "vitest";
import { GraphError } from "../../src/graphs/errors";
import { checkGraph, REFUSED_OPERATIONS } from "../../src/graphs/graph_check";
import { AttributeField, GraphField, ModelField, NodeField } from "../../src/graphs/onnx_fields";
import { content, integer } from "../../src/graphs/protobuf";
import { bytesOf, type Hex, vectors } from "../vectors";

interface GraphVector {
  name: string;
  is_graph: boolean;
  model: Hex;
}

const ALL = vectors<GraphVector>("graphs.json");
const [ADDING] = ALL.map(({ model }) => bytesOf(model));

describe("graphs.json", () => {
  test.each(ALL)("$name", ({ model, is_graph }) => {
    const check = () => checkGraph(bytesOf(model));
    if (is_graph) check();
    else expect(check).toThrow(GraphError);
  });

  const incomplete = ["nothing", "no-graph"];
  test.each(ALL.filter(({ is_graph, name }) => !is_graph && !incomplete.includes(name)))(
    "$name is not hidden by what follows",
    ({ model }) => {
      expect(() => checkGraph(Uint8Array.of(...bytesOf(model), ...ADDING!))).toThrow(GraphError);
    },
  );
});

function modelOf(...nodes: number[][]): Uint8Array {
  const graph = nodes.map((node) => content(GraphField.NODE, node));
  return Uint8Array.from(content(ModelField.GRAPH, ...graph));
}

test.each([...REFUSED_OPERATIONS])("a graph has no operation %s", (operation) => {
  expect(() => checkGraph(modelOf(content(NodeField.OPERATION, operation)))).toThrow(
    `no operation ${operation}`,
  );
});

test("a model of any depth is survived", () => {
  let graph: number[] = [];
  for (let depth = 0; depth < 500; depth++) {
    const attribute = content(AttributeField.GRAPH, graph);
    graph = content(GraphField.NODE, content(NodeField.ATTRIBUTE, attribute));
  }
  const model = Uint8Array.from(content(ModelField.GRAPH, graph));
  expect(() => checkGraph(model)).toThrow("more than 4 deep");
});

test("a domain is compared in all its bytes", () => {
  for (const domain of ["\ufeff", "\u0000", "ai.onnx\u0000", "ai.onnx.ml"]) {
    const node = [...content(NodeField.OPERATION, "Neg"), ...content(NodeField.DOMAIN, domain)];
    expect(() => checkGraph(modelOf(node)), domain).toThrow("default domain alone");
  }
});

test("what is no model is refused", () => {
  for (const model of [[], [8, 10], [...integer(ModelField.GRAPH, 1)], [0x3a, 0x80]]) {
    expect(() => checkGraph(Uint8Array.from(model))).toThrow("it is not an ONNX model");
  }
});

test("any bytes are refused or are a graph, and nothing else is raised", () => {
  let state = 7;
  const below = (n: number) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * n);
  };
  for (let round = 0; round < 3000; round++) {
    const data = Array.from(bytesOf(ALL[below(ALL.length)]!.model).subarray(0, 2000));
    for (let change = below(4); change >= 0; change--) {
      const at = below(data.length + 1);
      if (below(2)) data.splice(at, below(4));
      else data.splice(at, 0, [0, 1, 0x7f, 0x80, 0xff, below(256)][below(6)]!);
    }
    try {
      checkGraph(Uint8Array.from(data));
    } catch (error) {
      expect(error).toBeInstanceOf(GraphError);
    }
  }
});
