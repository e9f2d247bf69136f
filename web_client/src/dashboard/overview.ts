/**
 * What the PS answers to `overview`, and how it is read from a reply.
 *
 * Names are those of the protocol, units are in them. A figure that the PS does not know is null.
 * Columns and keys of a newer PS are ignored; those that an older one lacks are null.
 */

import { asMap, list, number, numbers, table, text, textOrNumber, truth } from "./reading";
import { type JobRecord, readRecords } from "./records";
import { readStages, type StageStep } from "./stages";
import { readTraffic, type Traffic } from "./traffic";

export interface ServerInfo {
  readonly version: string;
  readonly name: string;
  /** Which results the PS checks: `auto`, `all`, `sample:P` or `off`. */
  readonly verify: string;
  readonly started_s: number;
  readonly now_s: number;
  /** Devices connected with each of several servers; null for one that does not answer. */
  readonly servers: readonly (number | null)[];
}

export interface Card {
  readonly egress_bytes_per_s: number | null;
  readonly ingress_bytes_per_s: number | null;
}

export interface Totals {
  readonly blocks: number | null;
  readonly flops: number | null;
  readonly down_bytes: number | null;
  readonly up_bytes: number | null;
  readonly reissued: number | null;
  readonly wrong: number | null;
  readonly joined: number | null;
  readonly left: number | null;
}

export interface Rates {
  readonly window_s: number | null;
  readonly blocks_per_s: number | null;
  readonly flops_per_s: number | null;
  readonly egress_bytes_per_s: number | null;
  readonly ingress_bytes_per_s: number | null;
}

export interface JobPart {
  readonly job: string;
  readonly state: string;
  readonly model: string;
  /** Steps that it is to do in all. */
  readonly steps: number | null;
  /** The last step that is done, also of a run that it resumes. */
  readonly step: number;
  readonly started_s: number | null;
  /** For what it waits, as for devices; "" if for nothing. */
  readonly waits: string;
  readonly first_record: number;
  readonly records: readonly JobRecord[];
  readonly next_record: number;
  /** Of the step that is under way: tasks that are done, and all of them, 0 if not known. */
  readonly tasks: readonly [number, number] | null;
  /** The latest step of which the PS has a record, read here or not. */
  readonly last_step: number | null;
}

const DEVICE_TEXTS = ["identity", "name", "kind", "state", "reason", "energy_basis"] as const;
const DEVICE_NUMBERS = [
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
] as const;

export type DeviceText = (typeof DEVICE_TEXTS)[number];
export type DeviceNumber = (typeof DEVICE_NUMBERS)[number];

/**
 * One session; `reputation` is what the PS calls it, a word or a number, and `own` whether it is the
 * operator's own.
 */
export type Device = {
  readonly device: number;
  readonly reputation: string | number | null;
  readonly own: boolean;
} & {
  readonly [name in DeviceText]: string;
} & { readonly [name in DeviceNumber]: number | null };

/** How many devices of a kind ("" where nothing says) are in a state. */
export interface Crowd {
  readonly kind: string;
  readonly state: string;
  readonly count: number;
}

/** A box of a GEMM's index space, the device that has it, its blocks and how many are back. */
export interface PlanTile {
  readonly device: number;
  readonly m0: number;
  readonly m1: number;
  readonly n0: number;
  readonly n1: number;
  readonly k0: number;
  readonly k1: number;
  readonly blocks: number;
  readonly done: number;
}

export interface Plan {
  readonly name: string;
  readonly m: number;
  readonly n: number;
  readonly k: number;
  readonly predicted_s: number | null;
  readonly elapsed_s: number | null;
  readonly generation: number;
  readonly tiles: readonly PlanTile[];
}

/** A GEMM that is finished: what its plan promised and what it took. */
export interface FinishedGemm {
  readonly generation: number;
  readonly name: string;
  readonly predicted_s: number;
  readonly took_s: number;
}

export const LANES = ["receive", "compute", "send"] as const;
export type Lane = (typeof LANES)[number];

export interface Span {
  readonly lane: Lane;
  readonly start_s: number;
  readonly end_s: number;
}

export interface Timeline {
  readonly device: number;
  readonly spans: readonly Span[];
}

/** What a device did lately: times are seconds before the overview, as negative numbers. */
export interface DeviceStream {
  readonly device: number;
  readonly spans: readonly Span[];
}

/** What devices did in the last seconds, and of how many more the PS could tell something. */
export interface Stream {
  readonly window_s: number;
  readonly devices: readonly DeviceStream[];
  readonly hidden: number;
}

export interface FleetEvent {
  readonly id: number;
  readonly time_s: number;
  readonly kind: string;
  readonly device: number | null;
  readonly text: string;
}

export interface Energy {
  readonly devices_j: number | null;
  readonly ps_j: number | null;
  /** `measured`, `modelled` or `unknown`. */
  readonly ps_basis: string;
  readonly gco2e: number | null;
  readonly devices_known: number | null;
  readonly devices_unknown: number | null;
  readonly assumed: readonly string[];
}

/** A job of the server's queue, or one that has ended. */
export interface JobRow {
  readonly job: string;
  /** Of its run folder, where the operator gave one; else "". */
  readonly name: string;
  readonly model: string;
  readonly state: string;
  readonly step: number;
  readonly steps: number | null;
  readonly loss: number | null;
  /** Whether the job ended before the server was started, which then has no records of it. */
  readonly earlier: boolean;
}

export interface Overview {
  /** Whether this page may change jobs: its token is an operator's. */
  readonly operator: boolean;
  /** Those that ended and the one that runs, then the queued ones in their order. */
  readonly jobs: readonly JobRow[];
  readonly server: ServerInfo;
  readonly card: Card;
  readonly totals: Totals;
  /** By what it is for. */
  readonly traffic: Traffic;
  readonly rates: Rates;
  readonly job: JobPart | null;
  /** As many of them as a reply has room for. */
  readonly devices: readonly Device[];
  readonly devices_total: number;
  /** All of them. */
  readonly crowds: readonly Crowd[];
  readonly plan: Plan | null;
  readonly stages: StageStep | null;
  readonly gemms: readonly FinishedGemm[];
  readonly timeline: Timeline | null;
  readonly stream: Stream | null;
  readonly events: readonly FleetEvent[];
  readonly last_event: number;
  readonly energy: Energy;
}

/** The reply is not what this page understands. */
export class OverviewError extends Error {}

/** Read the `data` of a reply. Throws OverviewError where it is no overview. */
export function readOverview(data: unknown): Overview {
  const root = asMap(data);
  if (root === null || asMap(root.server) === null)
    throw new OverviewError("the server's answer is no overview; is it of another version?");
  const server = asMap(root.server) ?? {};
  const card = asMap(root.card) ?? {};
  const events = readEvents(root.events);
  const devices = readDevices(root.devices);
  const energy = asMap(root.energy) ?? {};
  return {
    operator: truth(root.operator),
    jobs: list(root.jobs).map(readJobRow),
    server: {
      version: text(server.version),
      name: text(server.name),
      verify: text(server.verify),
      started_s: number(server.started_s) ?? 0,
      now_s: number(server.now_s) ?? 0,
      servers: list(server.servers).map(number),
    },
    card: {
      egress_bytes_per_s: number(card.egress_bytes_per_s),
      ingress_bytes_per_s: number(card.ingress_bytes_per_s),
    },
    totals: numbers(root.totals, TOTALS),
    traffic: readTraffic(root.traffic),
    rates: numbers(root.rates, RATES),
    job: readJob(root.job),
    devices,
    devices_total: number(asMap(root.devices)?.total) ?? devices.length,
    crowds: readCrowds(asMap(root.devices)?.by),
    plan: readPlan(root.plan),
    stages: readStages(root.stages),
    gemms: readGemms(root.gemms),
    timeline: readTimeline(root.timeline),
    stream: readStream(root.stream),
    events: events.rows,
    last_event: events.last,
    energy: {
      ...numbers(energy, ENERGY),
      ps_basis: text(energy.ps_basis),
      assumed: list(energy.assumed).map(text),
    },
  };
}

const TOTALS = [
  "blocks",
  "flops",
  "down_bytes",
  "up_bytes",
  "reissued",
  "wrong",
  "joined",
  "left",
] as const;
const RATES = [
  "window_s",
  "blocks_per_s",
  "flops_per_s",
  "egress_bytes_per_s",
  "ingress_bytes_per_s",
] as const;
const ENERGY = ["devices_j", "ps_j", "gco2e", "devices_known", "devices_unknown"] as const;

function readJob(value: unknown): JobPart | null {
  const job = asMap(value);
  if (job === null) return null;
  const first = number(job.first_record) ?? 0;
  const raw = list(job.records);
  return {
    job: text(job.job),
    state: text(job.state),
    model: text(job.model),
    steps: number(job.steps),
    step: number(job.step) ?? 0,
    started_s: number(job.started_s),
    waits: text(job.waits),
    first_record: first,
    records: readRecords(raw),
    next_record: number(job.next_record) ?? first + raw.length,
    tasks: readTasks(list(job.tasks)),
    last_step: number(asMap(job.last_step)?.step),
  };
}

function readJobRow(value: unknown): JobRow {
  const job = asMap(value) ?? {};
  return {
    job: text(job.job),
    name: text(job.name),
    model: text(job.model),
    state: text(job.state),
    step: number(job.step) ?? 0,
    steps: number(job.steps),
    loss: number(job.loss),
    earlier: truth(job.earlier),
  };
}

function readTasks(value: readonly unknown[]): readonly [number, number] | null {
  const [done, of] = [number(value[0]), number(value[1])];
  return done === null || of === null ? null : [done, of];
}

function readDevices(value: unknown): Device[] {
  const { place, rows } = table(value);
  return rows.map((row) => {
    const device: Record<string, unknown> = {
      device: number(row[place("device")]) ?? 0,
      reputation: textOrNumber(row[place("reputation")]),
      own: truth(row[place("own")]),
    };
    for (const name of DEVICE_TEXTS) device[name] = text(row[place(name)]);
    for (const name of DEVICE_NUMBERS) device[name] = number(row[place(name)]);
    return device as unknown as Device;
  });
}

function readCrowds(value: unknown): Crowd[] {
  return list(value).map((item) => {
    const [kind, state, count] = list(item);
    return { kind: text(kind), state: text(state), count: number(count) ?? 0 };
  });
}

function readPlan(value: unknown): Plan | null {
  const plan = asMap(value);
  if (plan === null) return null;
  return {
    name: text(plan.name),
    m: number(plan.m) ?? 0,
    n: number(plan.n) ?? 0,
    k: number(plan.k) ?? 0,
    predicted_s: number(plan.predicted_s),
    elapsed_s: number(plan.elapsed_s),
    generation: number(plan.generation) ?? 0,
    tiles: list(plan.tiles).map((tile) => {
      const at = list(tile);
      const field = (index: number): number => number(at[index]) ?? 0;
      return {
        device: field(0),
        m0: field(1),
        m1: field(2),
        n0: field(3),
        n1: field(4),
        k0: field(5),
        k1: field(6),
        blocks: field(7),
        done: field(8),
      };
    }),
  };
}

function readGemms(value: unknown): FinishedGemm[] {
  const gemms: FinishedGemm[] = [];
  for (const item of list(value)) {
    const [generation, name, predicted, took] = list(item);
    const predicted_s = number(predicted);
    const took_s = number(took);
    if (predicted_s === null || took_s === null || predicted_s <= 0) continue;
    gemms.push({ generation: number(generation) ?? 0, name: text(name), predicted_s, took_s });
  }
  return gemms;
}

function readTimeline(value: unknown): Timeline | null {
  const timeline = asMap(value);
  if (timeline === null) return null;
  const spans: Span[] = [];
  for (const item of list(timeline.spans)) {
    const [lane, start, end] = list(item);
    const start_s = number(start);
    const end_s = number(end);
    if (isLane(lane) && start_s !== null && end_s !== null) spans.push({ lane, start_s, end_s });
  }
  return { device: number(timeline.device) ?? 0, spans };
}

function readStream(value: unknown): Stream | null {
  const stream = asMap(value);
  if (stream === null) return null;
  const devices = list(stream.devices).map((item) => {
    const [device, raw] = list(item);
    const spans: Span[] = [];
    for (const span of list(raw)) {
      const [place, ago_ms, took_ms] = list(span).map(number);
      const lane = LANES[place ?? -1];
      if (lane === undefined || ago_ms == null || took_ms == null) continue;
      spans.push({ lane, start_s: -ago_ms / 1000, end_s: (took_ms - ago_ms) / 1000 });
    }
    return { device: number(device) ?? 0, spans };
  });
  return { window_s: number(stream.window_s) ?? 0, devices, hidden: number(stream.hidden) ?? 0 };
}

function readEvents(value: unknown): { rows: FleetEvent[]; last: number } {
  const { place, rows } = table(value);
  const events = rows.map((row) => ({
    id: number(row[place("id")]) ?? 0,
    time_s: number(row[place("time_s")]) ?? 0,
    kind: text(row[place("kind")]),
    device: number(row[place("device")]),
    text: text(row[place("text")]),
  }));
  const stated = number(asMap(value)?.last);
  return { rows: events, last: stated ?? events.at(-1)?.id ?? 0 };
}

function isLane(value: unknown): value is Lane {
  return (LANES as readonly unknown[]).includes(value);
}
