/**
 * What a device looks at in a model before it runs it: whether it is a graph, and bounded.
 * `cleave/device/compute_thread.py` is the same in Python.
 *
 * A model comes from outside and goes into a large library. So it is read here first, in place and
 * with nothing of it kept: a graph is made of ONNX's own operations, has all that it needs within
 * it, and repeats something only for each row of what it is given.
 */

import { MAX_GRAPH_DEPTH, MAX_GRAPH_NODES } from "../protocol/limits";
import { shown } from "../protocol/codec";
import { GraphError } from "./errors";
import {
  AttributeField,
  GraphField,
  ModelField,
  NodeField,
  OpsetField,
  TensorField,
  TypeField,
  ValueField,
} from "./onnx_fields";
import { fields, type FieldValue, integers, ProtobufError } from "./protobuf";

/**
 * Operations of ONNX's default domain that graphs do not have: those that draw something at random,
 * and the one that may go on for ever.
 */
export const REFUSED_OPERATIONS: ReadonlySet<string> = new Set([
  "Bernoulli",
  "Dropout",
  "Loop",
  "Multinomial",
  "RandomNormal",
  "RandomNormalLike",
  "RandomUniform",
  "RandomUniformLike",
]);

const DOMAINS: ReadonlySet<string> = new Set(["", "ai.onnx"]); // two names of the default domain
const MOST_ELEMENTS_OF_A_BYTE = 2; // of the smallest types
const LONGEST_SHOWN = 60; // bytes of a text

/**
 * Refuse a model that is no graph as docs/protocol.md (*Graphs*) has it. It takes time in proportion
 * to the model's length, and little memory.
 *
 * @throws GraphError when it is no ONNX model, or has what graphs do not have; says what
 */
export function checkGraph(model: Uint8Array): void {
  try {
    new Check().model(model);
  } catch (error) {
    if (!(error instanceof ProtobufError)) throw error;
    throw new GraphError(`it is not an ONNX model: ${error.message}`);
  }
}

/**
 * The check of one model. A field that should come once may come again, and readers then take all
 * of it; so does this.
 */
class Check {
  #nodes = 0; // that were met, at any depth

  model(model: Uint8Array): void {
    let graphs = 0;
    for (const [number, value] of fields(model)) {
      if (number === ModelField.GRAPH) {
        graphs += 1;
        this.#graph(content(value), 1);
      } else if (number === ModelField.OPSET) {
        for (const [part, domain] of fields(content(value))) {
          if (part === OpsetField.DOMAIN) checkDomain(domain);
        }
      } else if (number === ModelField.FUNCTION) {
        throw new GraphError("a graph has no functions of its own, and this model has some");
      } else if (number === ModelField.TRAINING) {
        throw new GraphError("a graph does not say how it is trained, and this model does");
      }
    }
    if (graphs === 0) throw new GraphError("it is not an ONNX model: it contains no graph");
  }

  #graph(graph: Uint8Array, depth: number): void {
    if (depth > MAX_GRAPH_DEPTH) {
      throw new GraphError(`graphs stand in it more than ${MAX_GRAPH_DEPTH} deep`);
    }
    for (const [number, value] of fields(graph)) {
      if (number === GraphField.NODE) this.#node(content(value), depth);
      else if (number === GraphField.CONSTANT) checkTensor(content(value));
      else if (number === GraphField.SPARSE_CONSTANT) refuseSparse();
      else if (number === GraphField.INPUT || number === GraphField.OUTPUT) {
        checkValue(content(value));
      }
    }
  }

  #node(node: Uint8Array, depth: number): void {
    this.#nodes += 1;
    if (this.#nodes > MAX_GRAPH_NODES) {
      throw new GraphError(`it has more than ${MAX_GRAPH_NODES} operations`);
    }
    for (const [number, value] of fields(node)) {
      if (number === NodeField.OPERATION) {
        const operation = text(value);
        if (REFUSED_OPERATIONS.has(operation)) {
          throw new GraphError(`a graph has no operation ${operation}`);
        }
      } else if (number === NodeField.DOMAIN) {
        checkDomain(value);
      } else if (number === NodeField.ATTRIBUTE) {
        this.#attribute(content(value), depth);
      }
    }
  }

  #attribute(attribute: Uint8Array, depth: number): void {
    for (const [number, value] of fields(attribute)) {
      switch (number) {
        case AttributeField.GRAPH:
        case AttributeField.GRAPHS:
          this.#graph(content(value), depth + 1);
          break;
        case AttributeField.TENSOR:
        case AttributeField.TENSORS:
          checkTensor(content(value));
          break;
        case AttributeField.SPARSE_TENSOR:
        case AttributeField.SPARSE_TENSORS:
          refuseSparse();
      }
    }
  }
}

/** Refuse a constant that is in a file, or larger than its bytes. */
function checkTensor(tensor: Uint8Array): void {
  const most = MOST_ELEMENTS_OF_A_BYTE * tensor.length;
  let elements = 1;
  let empty = false;
  for (const [number, value] of fields(tensor)) {
    if (number === TensorField.SIZE) {
      for (const size of integers(value)) {
        empty ||= size === 0;
        elements = Math.min(elements * Math.max(size, 1), most + 1);
      }
    } else if (
      number === TensorField.EXTERNAL_DATA ||
      (number === TensorField.DATA_LOCATION && isThere(value))
    ) {
      throw new GraphError("a graph reads no files, and a constant of this model is in one");
    }
  }
  if (elements > most && !empty) {
    throw new GraphError(`a constant is larger than its ${tensor.length} bytes`);
  }
}

function isThere(value: FieldValue): boolean {
  return typeof value === "number" ? value !== 0 : value.length > 0;
}

/** Refuse an input or output that is not an array, but a list of them or the like. */
function checkValue(value: Uint8Array): void {
  for (const [number, of] of fields(value)) {
    if (number !== ValueField.TYPE) continue;
    for (const [kind] of fields(content(of))) {
      if (kind !== TypeField.TENSOR && kind !== TypeField.DENOTATION) {
        throw new GraphError("inputs and outputs of a graph are arrays, and not all here");
      }
    }
  }
}

function checkDomain(value: FieldValue): void {
  if (!DOMAINS.has(text(value))) {
    throw new GraphError(
      `a graph has operations of ONNX's default domain alone, and this model names ` +
        `'${shown(text(value))}'`,
    );
  }
}

function refuseSparse(): never {
  throw new GraphError("a graph has no sparse constants, and this model has some");
}

function content(value: FieldValue): Uint8Array {
  if (typeof value === "number") {
    throw new ProtobufError("an integer stands for a text or a message");
  }
  return value;
}

/** A text, cut to a length that may be shown and is longer than all that are compared. */
function text(value: FieldValue): string {
  // Without a mark at its start being dropped, which would make another text of it.
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  return decoder.decode(content(value).subarray(0, LONGEST_SHOWN));
}
