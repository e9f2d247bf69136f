/** Overviews as a PS sends them, for the tests of this folder. */

import type { Plain } from "../../src/protocol/messages";

type Map = { [name: string]: Plain };

export const DEVICE_COLUMNS = [
  "device",
  "identity",
  "name",
  "kind",
  "state",
  "reason",
  "reputation",
  "blocks",
  "compute_s",
  "down_bytes",
  "up_bytes",
  "downlink_bytes_per_s",
  "uplink_bytes_per_s",
  "flops_per_s",
  "profile_downlink_bytes_per_s",
  "profile_uplink_bytes_per_s",
  "profile_flops_per_s",
  "round_trip_s",
  "energy_j",
  "own",
];

/** A device's row, by column. */
export function deviceRow(fields: Map): Plain[] {
  return DEVICE_COLUMNS.map((column) => fields[column] ?? null);
}

export function step(number: number, more: Map = {}): Map {
  return {
    event: "step",
    step: number,
    loss: 10 / number,
    tokens: 512,
    clock: "wall",
    wall_s: 2,
    fleet_s: 1.5,
    ps_s: 0.5,
    downlink_bytes: 300,
    uplink_bytes: 100,
    floor_bytes: 200,
    reissued: 0,
    ...more,
  };
}

export function job(first: number, records: Plain[], more: Map = {}): Map {
  return {
    job: "j1",
    state: "running",
    model: "opt-tiny",
    steps: 100,
    started_s: 1000,
    first_record: first,
    records,
    next_record: first + records.length,
    ...more,
  };
}

export function events(...ids: number[]): Map {
  return {
    columns: ["id", "time_s", "kind", "device", "text"],
    rows: ids.map((id) => [id, 1000 + id, "join", id, `phone-${id} joined`]),
    last: ids.at(-1) ?? 0,
  };
}

/** The data of a reply; parts are replaced by those given. */
export function overviewData(parts: Map = {}): Map {
  return {
    server: { version: "0.1", started_s: 900, now_s: 1000, verify: "auto", name: "home" },
    card: { egress_bytes_per_s: 1.25e8, ingress_bytes_per_s: null },
    totals: {
      blocks: 10,
      flops: 1e12,
      down_bytes: 1000,
      up_bytes: 500,
      reissued: 0,
      wrong: 0,
      joined: 2,
      left: 0,
    },
    traffic: {
      down: { weights: 900, activations: 0, graphs: 100 },
      up: { weights: 0, gradients: 500 },
    },
    rates: {
      window_s: 10,
      blocks_per_s: 1,
      flops_per_s: 1e9,
      egress_bytes_per_s: 1e6,
      ingress_bytes_per_s: 5e5,
    },
    job: null,
    devices: { columns: DEVICE_COLUMNS, rows: [], total: 0, by: [] },
    plan: null,
    stages: null,
    timeline: null,
    events: events(),
    energy: {
      devices_j: null,
      ps_j: 5,
      ps_basis: "measured",
      gco2e: null,
      devices_known: 0,
      devices_unknown: 2,
      assumed: ["The PS draws 40 W."],
    },
    ...parts,
  };
}
