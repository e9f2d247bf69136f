/** Sums over the timelines of devices. Pure. */

import { LANES, type Lane, type Span } from "./overview";

/** From the first beginning to the last end; zeros without spans. */
export function extent(spans: readonly Span[]): {
  readonly start_s: number;
  readonly end_s: number;
} {
  if (spans.length === 0) return { start_s: 0, end_s: 0 };
  let start_s = Number.POSITIVE_INFINITY;
  let end_s = Number.NEGATIVE_INFINITY;
  for (const span of spans) {
    start_s = Math.min(start_s, span.start_s);
    end_s = Math.max(end_s, span.end_s);
  }
  return { start_s, end_s };
}

/** The share of its extent that each lane is busy; what overlaps counts once. */
export function busyShare(spans: readonly Span[]): { readonly [name in Lane]: number } {
  const { start_s, end_s } = extent(spans);
  return busyWithin(spans, start_s, end_s);
}

/** The share of the time from `start_s` to `end_s` that each lane is busy; none ends later. */
export function busyWithin(
  spans: readonly Span[],
  start_s: number,
  end_s: number,
): { readonly [name in Lane]: number } {
  const whole_s = end_s - start_s;
  const shares = LANES.map((lane) => {
    const own = spans.filter((span) => span.lane === lane).sort((a, b) => a.start_s - b.start_s);
    let busy_s = 0;
    let until_s = start_s;
    for (const span of own) {
      busy_s += Math.max(0, span.end_s - Math.max(span.start_s, until_s));
      until_s = Math.max(until_s, span.end_s);
    }
    return [lane, whole_s > 0 ? busy_s / whole_s : 0] as const;
  });
  return Object.fromEntries(shares) as { [name in Lane]: number };
}
