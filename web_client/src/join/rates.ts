/** Speeds from counters: what happened within the last seconds. */

import type { Counts } from "../device/session";

/** The device at a moment. */
export interface Sample {
  readonly at_s: number;
  readonly counts: Counts;
  /** Whether it had work to answer. */
  readonly busy: boolean;
}

/** Over how long the speed is taken, whether it helps, and the use of data. */
export const SPEED_S = 5;
export const DATA_S = 10;

/** Over how long, at most and at least, the use of data is averaged for forecasts. */
export const AVERAGE_S = 180;
const LEAST_AVERAGE_S = 60;

/** Less than a device sends and receives that has work. */
const IDLE_BYTES_PER_S = 10_000;

/** How long must be looked at before the use of data is said. */
const LEAST_S = 5;

/** The samples with a new one, without those that are too old to matter. */
export function withSample(samples: readonly Sample[], latest: Sample): Sample[] {
  return [...within(samples, latest.at_s - AVERAGE_S), latest];
}

/** FLOP/s over the last seconds; 0 where there are too few samples. */
export function flopsPerSecond(samples: readonly Sample[]): number {
  return rate(within(samples, now_s(samples) - SPEED_S), ({ flops }) => flops);
}

/**
 * Bytes a second over the last seconds, both ways together. Null where it is too early to say, or
 * there is no work. The server's tests of the device do not count.
 */
export function bytesPerSecond(samples: readonly Sample[]): number | null {
  return dataRate(within(samples, now_s(samples) - DATA_S), LEAST_S);
}

/** The same over the last minutes, for forecasts: a step's parts differ much in their data. */
export function averageBytesPerSecond(samples: readonly Sample[]): number | null {
  return dataRate(samples, LEAST_AVERAGE_S);
}

function dataRate(samples: readonly Sample[], least_s: number): number | null {
  const { tests } = samples.at(-1)?.counts ?? { tests: 0 };
  const work = samples.filter(({ counts }) => counts.tests === tests);
  if (now_s(work) - (work[0]?.at_s ?? 0) < least_s) return null;
  const bytes_per_s = rate(work, bytes);
  return bytes_per_s < IDLE_BYTES_PER_S ? null : bytes_per_s;
}

/** Whether the device had work within the last seconds: a run, or arrays that came or went. */
export function helps(samples: readonly Sample[]): boolean {
  const recent = within(samples, now_s(samples) - SPEED_S);
  const [first, last] = [recent[0], recent.at(-1)];
  if (!first || !last) return false;
  if (recent.some(({ busy }) => busy) || last.counts.blocks > first.counts.blocks) return true;
  return !isTested(samples) && rate(recent, bytes) >= IDLE_BYTES_PER_S;
}

/** Whether the server tested the device within the last seconds. */
export function isTested(samples: readonly Sample[]): boolean {
  const recent = within(samples, now_s(samples) - SPEED_S);
  return recent[0]?.counts.tests !== recent.at(-1)?.counts.tests;
}

function bytes({ down_bytes, up_bytes }: Counts): number {
  return down_bytes + up_bytes;
}

function now_s(samples: readonly Sample[]): number {
  return samples.at(-1)?.at_s ?? 0;
}

function rate(samples: readonly Sample[], of: (counts: Counts) => number): number {
  const [first, last] = [samples[0], samples.at(-1)];
  if (!first || !last || last.at_s <= first.at_s) return 0;
  return (of(last.counts) - of(first.counts)) / (last.at_s - first.at_s);
}

/** The samples since a moment, and the last one before it. */
function within(samples: readonly Sample[], begin_s: number): Sample[] {
  const old = samples.filter(({ at_s }) => at_s <= begin_s).at(-1);
  return [...(old ? [old] : []), ...samples.filter(({ at_s }) => at_s > begin_s)];
}
