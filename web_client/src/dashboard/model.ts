/** What the page knows, and how each thing that happens changes it. No clock, no network, no DOM. */

import type { Plain } from "../protocol/messages";
import type { LinkState } from "./link";
import type { FinishedGemm, FleetEvent, JobPart, Overview } from "./overview";
import type { EvalRecord, StepRecord, TextRecord } from "./records";
import { largestDifference, thin } from "./series";

/** Events kept; the PS keeps no more either. */
export const MAX_EVENTS = 500;
/** Replies whose rates are kept: ten minutes at one a second. */
export const MAX_SAMPLES = 600;
/** GEMMs whose prediction is held against what they took. */
export const MAX_GEMMS = 200;
const MAX_NOTES = 20;

/** Rates at one moment, for the network's chart. */
export interface Sample {
  readonly time_s: number;
  readonly egress_bytes_per_s: number | null;
  readonly ingress_bytes_per_s: number | null;
}

/** A job and all that was read of it so far. */
export interface JobModel {
  readonly job: string;
  readonly state: string;
  readonly model: string;
  readonly steps: number | null;
  /** The last step that is done, also of a run that it resumes. */
  readonly step: number;
  readonly started_s: number | null;
  /** For what it waits, as for devices; "" if for nothing. */
  readonly waits: string;
  /** What was last said of who multiplies; "" if nothing was. */
  readonly fleet_note: string;
  /** Of the step that is under way: tasks that are done, and all of them, 0 if not known. */
  readonly tasks: readonly [number, number] | null;
  readonly next_record: number;
  readonly step_records: readonly StepRecord[];
  readonly eval_records: readonly EvalRecord[];
  /** Of losses from the compared run's, of all steps and not only those kept; null: not compared. */
  readonly largest_difference: number | null;
  readonly notes: readonly string[];
}

export interface Model {
  readonly link: LinkState;
  /** The newest overview; null before the first. */
  readonly overview: Overview | null;
  /** Unix time by this machine's clock when it came. */
  readonly received_s: number;
  /** Why the last question was not answered; "" if it was. */
  readonly failure: string;
  readonly job: JobModel | null;
  readonly events: readonly FleetEvent[];
  readonly samples: readonly Sample[];
  readonly gemms: readonly FinishedGemm[];
  /** The device whose timeline is shown; 0: none. */
  readonly chosen: number;
  /** More records wait on the PS: ask at once. */
  readonly behind: boolean;
  /** Jobs whose losses are drawn next to the current job's, by ID; null until they are read. */
  readonly compared: ReadonlyMap<string, Comparison>;
  /** What came of the last change of a job that this page asked for; "" if there was none. */
  readonly outcome: string;
  /** The last records of a job that this page asked for. */
  readonly log: { readonly job: string; readonly lines: readonly string[] } | null;
}

export interface Comparison {
  /** null before its first records. */
  readonly job: JobModel | null;
  /** More records wait on the PS. */
  readonly behind: boolean;
}

export type Action =
  | { readonly kind: "link"; readonly state: LinkState }
  | { readonly kind: "overview"; readonly overview: Overview; readonly received_s: number }
  | { readonly kind: "failed"; readonly text: string }
  | { readonly kind: "compare"; readonly job: string }
  | { readonly kind: "compared"; readonly job: string; readonly overview: Overview }
  | { readonly kind: "outcome"; readonly text: string }
  | { readonly kind: "log"; readonly log: Model["log"] }
  | { readonly kind: "choose"; readonly device: number };

/** Before anything happened. */
export const EMPTY: Model = {
  link: { kind: "connecting" },
  overview: null,
  received_s: 0,
  failure: "",
  job: null,
  events: [],
  samples: [],
  gemms: [],
  chosen: 0,
  behind: false,
  compared: new Map(),
  outcome: "",
  log: null,
};

/** The model after `action`. */
export function reduce(model: Model, action: Action): Model {
  switch (action.kind) {
    case "link":
      return { ...model, link: action.state };
    case "failed":
      return { ...model, failure: action.text };
    case "choose":
      return { ...model, chosen: action.device === model.chosen ? 0 : action.device };
    case "overview":
      return take(model, action.overview, action.received_s);
    case "compare": {
      const compared = new Map(model.compared);
      if (!compared.delete(action.job)) compared.set(action.job, { job: null, behind: true });
      return { ...model, compared };
    }
    case "compared": {
      const known = model.compared.get(action.job);
      if (known === undefined) return model; // it was switched off meanwhile
      const compared = new Map(model.compared);
      compared.set(action.job, takeJob(known.job, action.overview.job));
      return { ...model, compared };
    }
    case "outcome":
      return { ...model, outcome: action.text };
    case "log":
      return { ...model, log: action.log };
  }
}

/** A compared job of which not all is read yet; undefined if there is none. */
export function unread(model: Model): string | undefined {
  return [...model.compared].find(([, { behind }]) => behind)?.[0];
}

/**
 * The arguments of the next `overview` request.
 *
 * @param compared the compared job whose records are wanted; else those of the current job
 */
export function question(model: Model, compared?: string): { [name: string]: Plain } {
  const job = compared === undefined ? model.job : model.compared.get(compared)?.job;
  return {
    after_event: model.overview?.last_event ?? 0,
    after_record: job?.next_record ?? 0,
    job: compared ?? "",
    device: model.chosen,
    stream: true,
  };
}

function take(model: Model, overview: Overview, received_s: number): Model {
  const restarted = model.overview?.server.started_s !== overview.server.started_s;
  const before = restarted
    ? { ...EMPTY, chosen: model.overview === null ? model.chosen : 0 }
    : model;
  const { job, behind } = takeJob(before.job, overview.job);
  // A restarted PS was asked for events after one of its predecessor's: ask again from its first.
  const stale = restarted && model.overview !== null;
  return {
    link: model.link,
    overview: stale ? { ...overview, last_event: 0 } : overview,
    received_s,
    failure: "",
    job,
    behind: behind || stale,
    events: stale ? [] : [...before.events, ...newer(before, overview)].slice(-MAX_EVENTS),
    samples: [...before.samples, sample(overview)].slice(-MAX_SAMPLES),
    gemms: [...before.gemms, ...laterGemms(before, overview)].slice(-MAX_GEMMS),
    chosen: before.chosen,
    compared: before.compared,
    outcome: before.outcome,
    log: before.log,
  };
}

function newer(model: Model, overview: Overview): readonly FleetEvent[] {
  const last = model.events.at(-1)?.id ?? 0;
  return overview.events.filter((event) => event.id > last);
}

function sample(overview: Overview): Sample {
  const { egress_bytes_per_s, ingress_bytes_per_s } = overview.rates;
  return { time_s: overview.server.now_s, egress_bytes_per_s, ingress_bytes_per_s };
}

/** Another job's records start at its first, so what came after the old job's last is of no use. */
function takeJob(
  known: JobModel | null,
  part: JobPart | null,
): { job: JobModel | null; behind: boolean } {
  if (part === null) return { job: null, behind: false };
  const about = {
    job: part.job,
    state: part.state,
    model: part.model,
    steps: part.steps,
    step: part.step,
    started_s: part.started_s,
    waits: part.waits,
    tasks: part.tasks,
  };
  const old = known !== null && known.job === part.job ? known : null;
  const next = old?.next_record ?? 0;
  if (part.first_record > next) {
    const none = { step_records: [], eval_records: [], largest_difference: null, notes: [] };
    return { job: { ...about, next_record: 0, fleet_note: "", ...none }, behind: true };
  }
  const follows = part.first_record === next;
  const records = follows ? part.records : [];
  const fleet_note = records.filter(isFleet).at(-1)?.text ?? old?.fleet_note ?? "";
  const texts = records.flatMap((record) => ("text" in record ? [record.text] : []));
  const steps = records.filter(isStep);
  const step_records = thin([...(old?.step_records ?? []), ...steps]);
  const advanced = follows && part.next_record > next;
  return {
    job: {
      ...about,
      next_record: follows ? part.next_record : next,
      fleet_note,
      step_records,
      eval_records: thin([...(old?.eval_records ?? []), ...records.filter(isEval)]),
      largest_difference: largestDifference(old?.largest_difference ?? null, steps),
      notes: [...(old?.notes ?? []), ...texts].slice(-MAX_NOTES),
    },
    // The PS cuts a reply by records and by bytes: only its latest step tells whether it did.
    behind: advanced && part.last_step !== null && step_records.at(-1)?.step !== part.last_step,
  };
}

function laterGemms(model: Model, overview: Overview): readonly FinishedGemm[] {
  const known = new Set(model.gemms.map((gemm) => gemm.generation));
  return overview.gemms.filter((gemm) => !known.has(gemm.generation));
}

/** Whether what a job waits for is devices. */
export function lacksDevices(job: JobModel): boolean {
  return job.waits !== "" && job.waits === job.fleet_note;
}

function isStep(record: { event: string }): record is StepRecord {
  return record.event === "step";
}

function isFleet(record: { event: string }): record is TextRecord {
  return record.event === "fleet";
}

function isEval(record: { event: string }): record is EvalRecord {
  return record.event === "eval";
}
