/** Speeds from counters: what happened within the last seconds. */

import type { Counts } from "../device/session";

/** Counters at a moment. */
export interface Sample {
  readonly at_s: number;
  readonly counts: Counts;
}

/** Over how long the speed is taken, and the use of data. */
export const SPEED_S = 5;
export const DATA_S = 60;

/** Less than a device sends and receives that has work. */
const IDLE_BYTES_PER_S = 10_000;

/** How long must be looked at before the use of data is said: it begins with measuring the link. */
const LEAST_S = 15;

/** The samples with a new one, without those that are too old to matter. */
export function withSample(samples: readonly Sample[], latest: Sample): Sample[] {
  return [...within(samples, latest.at_s - DATA_S), latest];
}

/** FLOP/s over the last seconds; 0 where there are too few samples. */
export function flopsPerSecond(samples: readonly Sample[]): number {
  return rate(samples, SPEED_S, ({ flops }) => flops);
}

/** Bytes a second over the last minute, both ways together; null where it is too early to say. */
export function bytesPerSecond(samples: readonly Sample[]): number | null {
  const [first, last] = [samples[0], samples.at(-1)];
  if (!first || !last || last.at_s - first.at_s < LEAST_S) return null;
  return rate(samples, DATA_S, ({ down_bytes, up_bytes }) => down_bytes + up_bytes);
}

/**
 * Whether nothing was finished or sent within the last minute, heartbeats aside. Before its first
 * work, a device is idle as soon as the measurement of its link is over.
 */
export function isIdle(samples: readonly Sample[]): boolean {
  const [first, last] = [samples[0], samples.at(-1)];
  if (!first || !last) return false;
  const span_s = last.counts.blocks + last.counts.graphs > 0 ? DATA_S : SPEED_S;
  if (last.at_s - first.at_s < span_s - SPEED_S) return false;
  const bytes_per_s = rate(samples, span_s, ({ down_bytes, up_bytes }) => down_bytes + up_bytes);
  return rate(samples, span_s, ({ blocks }) => blocks) === 0 && bytes_per_s < IDLE_BYTES_PER_S;
}

function rate(samples: readonly Sample[], span_s: number, of: (counts: Counts) => number): number {
  const last = samples.at(-1);
  if (!last) return 0;
  const [first = last] = within(samples, last.at_s - span_s);
  if (last.at_s <= first.at_s) return 0;
  return (of(last.counts) - of(first.counts)) / (last.at_s - first.at_s);
}

/** The samples since a moment, and the last one before it. */
function within(samples: readonly Sample[], begin_s: number): Sample[] {
  const old = samples.filter(({ at_s }) => at_s <= begin_s).at(-1);
  return [...(old ? [old] : []), ...samples.filter(({ at_s }) => at_s > begin_s)];
}
