/** Series of steps, as charts and figures need them. Pure. */

import type { EvalRecord, StepRecord } from "./records";

/** Points that a series keeps. A chart is no wider. */
export const MAX_POINTS = 4000;
/** Steps that "now" means in tokens/s, step time and time left. */
const RECENT_STEPS = 10;

/** The same series with at most MAX_POINTS: of its older half, every second point is left out. */
export function thin<Point>(points: readonly Point[]): readonly Point[] {
  if (points.length <= MAX_POINTS) return points;
  const half = points.length >> 1;
  return thin(points.filter((_, index) => index >= half || index % 2 === 0));
}

/** What the last steps say about the pace. */
export interface Pace {
  readonly steps: number;
  readonly step_s: number;
  readonly ps_s: number;
  readonly fleet_s: number;
  readonly tokens_per_s: number;
  /** Until the job's last step; null where that is not known. */
  readonly left_s: number | null;
  /** Bytes sent both ways over the fewest possible. */
  readonly traffic_ratio: number | null;
}

/**
 * The pace of the last ten steps, or null before the first.
 *
 * @param records steps done so far
 * @param steps that the job is to do in all; null where that is not known
 */
export function pace(records: readonly StepRecord[], steps: number | null): Pace | null {
  const recent = records.slice(-RECENT_STEPS);
  const last = recent.at(-1);
  if (last === undefined) return null;
  const sum = (of: (record: StepRecord) => number) =>
    recent.reduce((total, record) => total + of(record), 0);
  const floor_bytes = sum((record) => record.floor_bytes);
  const bytes = sum((record) => record.downlink_bytes + record.uplink_bytes);
  // Medians: a step in which nobody was there says nothing about the next one.
  const step_s = median(recent.map((record) => record.wall_s));
  return {
    steps: recent.length,
    step_s,
    ps_s: median(recent.map((record) => record.ps_s)),
    fleet_s: median(recent.map((record) => record.fleet_s)),
    tokens_per_s: median(recent.map((record) => record.tokens)) / Math.max(step_s, 1e-9),
    left_s: steps === null ? null : Math.max(0, steps - last.step) * step_s,
    traffic_ratio: floor_bytes > 0 ? bytes / floor_bytes : null,
  };
}

/**
 * Losses over steps, aligned: `[step, loss, held-out loss, compared run's loss, others' losses ...]`.
 *
 * @param others steps of other jobs
 */
export function lossSeries(
  steps: readonly StepRecord[],
  evals: readonly EvalRecord[],
  others: readonly (readonly StepRecord[])[] = [],
): [number[], ...(number | null)[][]] {
  const held = new Map(evals.map((record) => [record.step, record.eval_loss]));
  const losses = new Map(steps.map((record) => [record.step, record.loss]));
  const against = new Map(steps.map((record) => [record.step, record.against_loss]));
  const theirs = others.map((each) => new Map(each.map((record) => [record.step, record.loss])));
  const known = [losses, held, ...theirs].flatMap((each) => [...each.keys()]);
  const at = [...new Set(known)].sort((a, b) => a - b);
  const aligned = (values: ReadonlyMap<number, number | null>) =>
    at.map((step) => finite(values.get(step)));
  return [at, aligned(losses), aligned(held), aligned(against), ...theirs.map(aligned)];
}

/**
 * How far losses are at most from those of the compared run, as a share of the latter.
 *
 * @param known the most of earlier steps; null where none was compared
 * @returns infinite if one of the two losses alone is no finite number
 */
export function largestDifference(
  known: number | null,
  records: readonly StepRecord[],
): number | null {
  return records.reduce<number | null>((most, { loss, against_loss }) => {
    if (against_loss === null || against_loss === 0) return most;
    const [here, there] = [Number.isFinite(loss), Number.isFinite(against_loss)];
    if (!here && !there) return most;
    const off = here && there ? Math.abs((loss - against_loss) / against_loss) : Infinity;
    return Math.max(most ?? 0, off);
  }, known);
}

/** Step time over steps, stacked: `[step, PS, PS and fleet]`, seconds. */
export function timeSeries(steps: readonly StepRecord[]): [number[], number[], number[]] {
  return [
    steps.map((record) => record.step),
    steps.map((record) => record.ps_s),
    steps.map((record) => record.ps_s + record.fleet_s),
  ];
}

/** Where a chart's scale ends, so that a few steps that took very long do not flatten all others. */
export function scaleTop(values: readonly number[]): number {
  return values.length === 0 ? Number.POSITIVE_INFINITY : OUTLIER * median(values);
}

/** So many times the median is out of the ordinary. */
const OUTLIER = 6;

function median(values: readonly number[]): number {
  const sorted = [...values].sort((a, b) => a - b);
  const half = sorted.length >> 1;
  const upper = sorted[half] ?? 0;
  return sorted.length % 2 === 1 ? upper : ((sorted[half - 1] ?? 0) + upper) / 2;
}

/** A running mean over a twentieth of the series (at least 1): what a noisy loss tends to. */
export function smooth(values: readonly (number | null)[]): (number | null)[] {
  const window = Math.max(1, Math.floor(values.length / 20));
  let sum = 0;
  let count = 0;
  return values.map((value, index) => {
    const gone = index >= window ? (values[index - window] ?? null) : null;
    if (value !== null) {
      sum += value;
      count += 1;
    }
    if (gone !== null) {
      sum -= gone;
      count -= 1;
    }
    return count > 0 ? sum / count : null;
  });
}

function finite(value: number | null | undefined): number | null {
  return value != null && Number.isFinite(value) ? value : null;
}
