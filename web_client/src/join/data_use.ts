/** What this browser did and sent over hours, days and months, and the limit of its data. */

import type { Counts } from "../device/session";
import { quantity } from "../ui/figures";
import type { Saved } from "./saved";

/** Over what bytes are counted; hours, days and months are those of the local clock. */
export enum Span {
  HOUR = "hour",
  DAY = "day",
  MONTH = "month",
}

/** A limit of bytes, down and up together. */
export interface DataCap {
  readonly bytes: number;
  readonly span: Span;
}

/** What was counted in the span of this name. */
export interface Counted {
  readonly name: string;
  readonly bytes: number;
  readonly flops: number;
  /** Time in which the device worked. */
  readonly seconds: number;
}

/** The limit until the owner chooses another. */
export const STANDARD_CAP: DataCap = { bytes: 2e9, span: Span.DAY };

/** The longest time between two reports that counts: a phone may sleep in between. */
const LONGEST_S = 5;

/** Each span as people name the one that is now. */
export const WHEN: { readonly [S in Span]: string } = {
  [Span.HOUR]: "this hour",
  [Span.DAY]: "today",
  [Span.MONTH]: "this month",
};

/** Each span as part of a rate. */
export const EACH: { readonly [S in Span]: string } = {
  [Span.HOUR]: "an hour",
  [Span.DAY]: "a day",
  [Span.MONTH]: "a month",
};

const SPANS = Object.values(Span);

/** Name the span that a time is in. */
export function spanName(span: Span, now: Date): string {
  const two = (n: number) => String(n).padStart(2, "0");
  const month = `${now.getFullYear()}-${two(now.getMonth() + 1)}`;
  if (span === Span.MONTH) return month;
  const day = `${month}-${two(now.getDate())}`;
  return span === Span.DAY ? day : `${day} ${two(now.getHours())}`;
}

/** The least and the most gigabytes of a limit: less is used before any work, more would be none. */
const LEAST_GIGABYTES = 0.001;
const MOST_GIGABYTES = 1000;

/** Gigabytes as a person typed them; null for anything that is no limit. */
export function readGigabytes(typed: string): number | null {
  const value = numberOf(typed);
  return value !== null && value >= LEAST_GIGABYTES && value <= MOST_GIGABYTES ? value : null;
}

/** Whether a person may go on typing, e.g. after `0.`. */
export function isUnfinished(typed: string): boolean {
  return /^0?[.,]?0*$/.test(typed.trim());
}

/** Why what a person typed is no limit, for people. */
export function refusedGigabytes(typed: string, cap: DataCap): string {
  const value = numberOf(typed);
  let why = `“${typed.trim()}” is not an amount.`;
  if (typed.trim() === "") why = "No amount is entered.";
  else if (value !== null && value > MOST_GIGABYTES)
    why = `${typed.trim()} GB would be no limit: untick the box instead.`;
  else if (value !== null) why = `${typed.trim()} GB is too little to help.`;
  const allowed = `Enter ${LEAST_GIGABYTES} to ${MOST_GIGABYTES} GB.`;
  return `${why} ${allowed} Until then, the limit stays ${amount(cap.bytes)} ${EACH[cap.span]}.`;
}

/** A number as a person typed it; null for anything else. */
function numberOf(typed: string): number | null {
  const text = typed.trim().replace(",", "."); // a phone's keyboard has the comma of its language
  return /^(\d+\.?\d*|\.\d+)$/.test(text) ? Number(text) : null;
}

/** A limit as it was kept; null where it is none. */
export function readCap(cap: unknown): DataCap | null {
  const { bytes, span } = (cap ?? {}) as Partial<DataCap>;
  if (!Number.isFinite(bytes) || !bytes || bytes < 0) return null;
  return span && SPANS.includes(span) ? { bytes, span } : null;
}

/** Why no more data may be used now and when it may, for people; null if it may. */
export function overCap(cap: DataCap | null, used: number, now: Date): string | null {
  if (!cap || used < cap.bytes) return null;
  const limit = `Your limit of ${amount(cap.bytes)} ${EACH[cap.span]} is reached.`;
  return `${limit} Helping continues ${nextText(cap.span, now)}, or with a higher limit.`;
}

/** When the next span begins. */
function nextSpan(span: Span, now: Date): Date {
  const [year, month, day] = [now.getFullYear(), now.getMonth(), now.getDate()];
  if (span === Span.MONTH) return new Date(year, month + 1);
  return span === Span.DAY
    ? new Date(year, month, day + 1)
    : new Date(year, month, day, now.getHours() + 1);
}

/** The same, for people. */
function nextText(span: Span, now: Date): string {
  const next = nextSpan(span, now);
  if (span === Span.HOUR) return `at ${next.getHours()}:00`;
  if (span === Span.DAY) return "at midnight";
  return `on ${next.toLocaleDateString("en-GB", { day: "numeric", month: "long" })}`;
}

/** An amount of data, for people, e.g. `2 GB`, `1.5 GB`. */
export function amount(bytes: number): string {
  return quantity(bytes, "B")
    .replace(/(\.\d*?)0+ /, "$1 ")
    .replace(". ", " ");
}

/** How long the rest of a limit lasts, for people; null if the next span begins before. */
export function lasting(
  { bytes, span }: DataCap,
  used: number,
  bytes_per_s: number,
  now: Date,
): string | null {
  const minutes = Math.max(0, bytes - used) / bytes_per_s / 60;
  if (60_000 * minutes > nextSpan(span, now).getTime() - now.getTime()) return null;
  if (minutes < 1.5) return "about a minute";
  if (minutes < 10) return `about ${Math.round(minutes)} minutes`;
  if (minutes < 90) return `about ${5 * Math.round(minutes / 5)} minutes`;
  return `about ${Math.round(minutes / 60)} hours`;
}

/** Counts over all spans, also over several visits; the limit may be set at any time. */
export class DataMeter {
  #visit = { bytes: 0, flops: 0 }; // the device's counters so far
  #worked: number | null = null; // when the device last reported that it works
  #counted: { [span: string]: Counted };
  #visit_s = 0;

  /** @param now the local time */
  constructor(
    private readonly saved: Saved,
    private readonly now: () => Date,
  ) {
    this.#counted = saved.dataUse();
  }

  /** The device starts anew, and so do its counters. */
  begin(): void {
    this.#visit = { bytes: 0, flops: 0 };
    this.#worked = null;
    this.#visit_s = 0;
    // Another tab may have counted since this page was opened.
    this.#counted = { ...this.#counted, ...this.saved.dataUse() };
  }

  /** Time in which the device worked since it started. */
  get visit_s(): number {
    return this.#visit_s;
  }

  /** Take in a device's counters. */
  count({ down_bytes, up_bytes, flops }: Counts, works: boolean): void {
    const now = this.now();
    const bytes = down_bytes + up_bytes;
    const since_s = this.#worked === null ? 0 : (now.getTime() - this.#worked) / 1000;
    const worked_s = Math.min(LONGEST_S, Math.max(0, since_s));
    this.#visit_s += worked_s;
    for (const span of SPANS) {
      const before = this.of(span);
      this.#counted[span] = {
        name: before.name,
        bytes: before.bytes + bytes - this.#visit.bytes,
        flops: before.flops + flops - this.#visit.flops,
        seconds: before.seconds + worked_s,
      };
    }
    this.#visit = { bytes, flops };
    this.#worked = works ? now.getTime() : null;
  }

  /** What was counted in the span that is now. */
  of(span: Span): Counted {
    const name = spanName(span, this.now());
    const { bytes = 0, flops = 0, seconds = 0 } = kept(this.#counted[span], name);
    return { name, bytes, flops, seconds };
  }

  /** Write them down. */
  keep(): void {
    this.saved.keepDataUse(this.#counted);
  }
}

/** What an earlier visit kept of a span; nothing if it was of another one. */
function kept(counted: Partial<Counted> | undefined, name: string): Partial<Counted> {
  return counted?.name === name ? counted : {};
}
