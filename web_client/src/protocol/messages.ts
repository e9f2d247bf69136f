/**
 * The messages of docs/protocol.md: one table, from which types and checks follow. Fields keep
 * their names on the wire.
 */

import { VERSION } from "./limits";

export enum Op {
  MATMUL = "matmul",
}

/** What peers may do besides what every peer of this version can. */
export enum Feature {
  GRAPHS = "graphs",
  CODING = "coding",
  KEEPS = "keeps",
}

/** Who says hello. */
export enum Role {
  DEVICE = "device",
  OPERATOR = "operator",
}

/** Why a session ends with `bye`; a peer may know more. */
export enum ByeCode {
  UNSTATED = "",
  CLOSING = "closing",
  DRAINED = "drained",
  MEASURED = "measured",
  LEAVING = "leaving",
  MOVED = "moved",
}

/** Why a session ends with `error`; a peer may know more. */
export enum ErrorCode {
  VERSION = "version",
  CREDENTIAL = "credential",
  PROTOCOL = "protocol",
  LIMIT = "limit",
  REQUEST = "request",
  QUARANTINED = "quarantined",
  DUPLICATE = "duplicate",
}

/** What fields hold, by the names of docs/protocol.md's field types. */
export enum Kind {
  ID = "id",
  COUNT = "count",
  REAL = "real",
  TEXT = "text",
  /** A text that is compared, and never shown. */
  SECRET = "secret text",
  BOOL = "bool",
  IDS = "ids",
  COUNTS = "counts",
  INPUTS = "inputs",
  SIZES = "sizes",
  TEXTS = "texts",
  VALUES = "values",
  MAP = "map",
  ROLE = "role",
}

/** An untyped value, as it is written and read; integers beyond 2^53 are bigints. */
export type Plain = null | boolean | number | bigint | string | Plain[] | { [key: string]: Plain };

/** Each kind in TypeScript. Counts beyond 2^53, which no array has, lose their last digits. */
interface TypeOf {
  [Kind.ID]: bigint;
  [Kind.COUNT]: number;
  [Kind.REAL]: number;
  [Kind.TEXT]: string;
  [Kind.SECRET]: string;
  [Kind.BOOL]: boolean;
  [Kind.IDS]: bigint[];
  [Kind.COUNTS]: number[];
  [Kind.INPUTS]: bigint[];
  [Kind.SIZES]: number[];
  [Kind.TEXTS]: string[];
  [Kind.VALUES]: { [key: string]: number };
  [Kind.MAP]: { [key: string]: Plain };
  [Kind.ROLE]: Role;
}

/** A field: what it holds, and what it is where it was left out; null for a required one. */
export interface Field<K extends Kind = Kind> {
  readonly kind: K;
  readonly missing: (() => TypeOf[K]) | null;
}

/** A message: its fields, and whether a payload follows them. */
export interface Schema {
  readonly fields: { readonly [name: string]: Field };
  readonly payload: boolean;
}

function required<K extends Kind>(kind: K): Field<K> {
  return { kind, missing: null };
}

function optional<K extends Kind>(kind: K, missing: () => TypeOf[K]): Field<K> {
  return { kind, missing };
}

const zero = () => 0;
const empty = () => "";

export const SCHEMAS = {
  hello: {
    fields: {
      role: required(Kind.ROLE),
      version: required(Kind.COUNT),
      credential: optional(Kind.SECRET, empty),
      name: optional(Kind.TEXT, empty),
      ops: optional(Kind.TEXTS, () => []),
      dtypes: optional(Kind.TEXTS, () => []),
      memory_bytes: optional(Kind.COUNT, zero),
      profile: optional(Kind.TEXT, empty),
      flops_per_s: optional(Kind.REAL, zero),
      downlink_bytes_per_s: optional(Kind.REAL, zero),
      uplink_bytes_per_s: optional(Kind.REAL, zero),
      latency_s: optional(Kind.REAL, zero),
      measure: optional(Kind.BOOL, () => false),
      join_code: optional(Kind.SECRET, empty),
      kind: optional(Kind.TEXT, empty),
      versions: optional(Kind.COUNTS, () => []),
      features: optional(Kind.TEXTS, () => []),
      graph_flops_per_s: optional(Kind.REAL, zero),
      graph_bf16_flops_per_s: optional(Kind.REAL, zero),
      holds: optional(Kind.SECRET, empty),
    },
    payload: false,
  },
  welcome: {
    fields: {
      device: required(Kind.ID),
      version: optional(Kind.COUNT, () => VERSION),
      heartbeat_s: optional(Kind.REAL, () => 2),
      server: optional(Kind.TEXT, empty),
      credential: optional(Kind.SECRET, empty),
      features: optional(Kind.TEXTS, () => []),
      arrays: optional(Kind.SECRET, empty),
    },
    payload: false,
  },
  held: { fields: { ids: required(Kind.IDS) }, payload: false },
  put: {
    fields: {
      id: required(Kind.ID),
      rows: required(Kind.COUNT),
      columns: required(Kind.COUNT),
      dtype: required(Kind.TEXT),
    },
    payload: true,
  },
  put_coded: {
    fields: {
      id: required(Kind.ID),
      rows: required(Kind.COUNT),
      columns: required(Kind.COUNT),
      dtype: required(Kind.TEXT),
    },
    payload: true,
  },
  code_results: { fields: {}, payload: false },
  run: {
    fields: {
      id: required(Kind.ID),
      op: required(Kind.TEXT),
      inputs: required(Kind.INPUTS),
      transpose_a: required(Kind.BOOL),
      transpose_b: required(Kind.BOOL),
      out: required(Kind.TEXT),
    },
    payload: false,
  },
  graph: {
    fields: { id: required(Kind.ID), products: optional(Kind.TEXT, empty) },
    payload: true,
  },
  concat: { fields: { id: required(Kind.ID), ids: required(Kind.INPUTS) }, payload: false },
  run_graph: {
    fields: {
      id: required(Kind.ID),
      graph: required(Kind.ID),
      inputs: required(Kind.INPUTS),
      outputs: required(Kind.INPUTS),
      output_bytes: required(Kind.SIZES),
      flops: optional(Kind.COUNT, zero),
    },
    payload: false,
  },
  fetch: {
    fields: {
      id: required(Kind.ID),
      array: required(Kind.ID),
      first_row: required(Kind.COUNT),
      rows: required(Kind.COUNT),
      columns: required(Kind.COUNT),
      out: required(Kind.TEXT),
    },
    payload: false,
  },
  computed: {
    fields: { id: required(Kind.ID), compute_s: required(Kind.REAL) },
    payload: false,
  },
  result: {
    fields: {
      id: required(Kind.ID),
      rows: required(Kind.COUNT),
      columns: required(Kind.COUNT),
      dtype: required(Kind.TEXT),
      compute_s: required(Kind.REAL),
    },
    payload: true,
  },
  result_coded: {
    fields: {
      id: required(Kind.ID),
      rows: required(Kind.COUNT),
      columns: required(Kind.COUNT),
      dtype: required(Kind.TEXT),
      compute_s: required(Kind.REAL),
    },
    payload: true,
  },
  task_error: {
    fields: { id: required(Kind.ID), reason: required(Kind.TEXT) },
    payload: false,
  },
  drop: { fields: { ids: required(Kind.IDS) }, payload: false },
  cancel: { fields: { ids: required(Kind.IDS) }, payload: false },
  measured: {
    fields: {
      downlink_bytes_per_s: required(Kind.REAL),
      uplink_bytes_per_s: required(Kind.REAL),
      latency_s: required(Kind.REAL),
    },
    payload: false,
  },
  heartbeat: { fields: {}, payload: false },
  telemetry: { fields: { values: optional(Kind.VALUES, () => ({})) }, payload: false },
  drain: { fields: {}, payload: false },
  bye: {
    fields: {
      reason: optional(Kind.TEXT, empty),
      code: optional(Kind.TEXT, empty),
      retry_after_s: optional(Kind.REAL, zero),
      address: optional(Kind.TEXT, empty),
    },
    payload: false,
  },
  error: {
    fields: {
      code: required(Kind.TEXT),
      message: required(Kind.TEXT),
      retry_after_s: optional(Kind.REAL, zero),
      versions: optional(Kind.COUNTS, () => []),
    },
    payload: false,
  },
  request: {
    fields: {
      id: required(Kind.ID),
      action: required(Kind.TEXT),
      arguments: optional(Kind.MAP, () => ({})),
    },
    payload: false,
  },
  reply: {
    fields: {
      id: required(Kind.ID),
      ok: required(Kind.BOOL),
      data: optional(Kind.MAP, () => ({})),
    },
    payload: false,
  },
  job_record: {
    fields: { job: required(Kind.TEXT), record: optional(Kind.MAP, () => ({})) },
    payload: false,
  },
} as const satisfies { [type: string]: Schema };

/** The name of a message. */
export type MessageType = keyof typeof SCHEMAS;

type FieldsOf<T extends MessageType> = {
  -readonly [
    N in keyof (typeof SCHEMAS)[T]["fields"]
  ]: (typeof SCHEMAS)[T]["fields"][N] extends Field<infer K> ? TypeOf[K] : never;
};

/** One message: its type, its fields, and its payload where it has one. */
export type MessageOf<T extends MessageType> = { type: T } & FieldsOf<T> &
  ((typeof SCHEMAS)[T]["payload"] extends true ? { payload: Uint8Array } : unknown);

/** Any message. */
export type Message = { [T in MessageType]: MessageOf<T> }[MessageType];

/** A message without a payload, of ours: what is not given is what a reader would take for it. */
export function make<T extends MessageType>(
  type: T,
  given: Partial<FieldsOf<T>>,
): { type: T } & FieldsOf<T> {
  const schema: Schema = SCHEMAS[type];
  const fields: { [name: string]: unknown } = {};
  for (const [name, { missing }] of Object.entries(schema.fields)) fields[name] = missing?.();
  return { type, ...fields, ...given } as { type: T } & FieldsOf<T>;
}
