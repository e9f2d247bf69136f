/** Speeds from counters: what happened within the last seconds. */

import type { Counts } from "../device/session";

/** Counters at a moment. */
export interface Sample {
  readonly at_s: number;
  readonly counts: Counts;
}

/** Over how long speeds are taken. */
export const WINDOW_S = 5;

/** The samples with a new one, without those that are too old to matter. */
export function withSample(samples: readonly Sample[], latest: Sample): Sample[] {
  const begin_s = latest.at_s - WINDOW_S;
  const old = samples.filter(({ at_s }) => at_s <= begin_s).at(-1);
  const young = samples.filter(({ at_s }) => at_s > begin_s);
  return [...(old ? [old] : []), ...young, latest];
}

/** FLOP/s over the samples; 0 where they are too few. */
export function flopsPerSecond(samples: readonly Sample[]): number {
  const [first, last] = [samples[0], samples.at(-1)];
  if (!first || !last || last.at_s <= first.at_s) return 0;
  return (last.counts.flops - first.counts.flops) / (last.at_s - first.at_s);
}
