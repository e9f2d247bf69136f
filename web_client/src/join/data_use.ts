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
  /** Time in which the device was connected and allowed to work. */
  readonly seconds: number;
}

/** The limit until the owner chooses another. */
export const STANDARD_CAP: DataCap = { bytes: 2e9, span: Span.DAY };

/** The longest time between two reports that counts: a phone may sleep in between. */
const LONGEST_S = 5;

/** Each span as people name the one that is now. */
export const WHEN: { readonly [S in Span]: string } = {
  [Span.HOUR]: "in this hour",
  [Span.DAY]: "today",
  [Span.MONTH]: "in this month",
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

/** More than any device uses: a larger limit would be none. */
const MOST_GIGABYTES = 100_000;

/** Gigabytes as a person typed them; null for anything but a number above 0 that may be reached. */
export function readGigabytes(typed: string): number | null {
  const text = typed.trim().replace(",", "."); // a phone's keyboard has the comma of its language
  const value = /^(\d+\.?\d*|\.\d+)$/.test(text) ? Number(text) : 0;
  return value > 0 && value <= MOST_GIGABYTES ? value : null;
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
  const limit = `Your limit of ${amount(cap)} ${WHEN[cap.span]} is reached.`;
  return `${limit} Work continues ${nextSpan(cap.span, now)}, or with a higher limit.`;
}

/** When the next span begins, for people. */
function nextSpan(span: Span, now: Date): string {
  if (span === Span.HOUR) return `at ${(now.getHours() + 1) % 24}:00`;
  if (span === Span.DAY) return "at midnight";
  const next = new Date(now.getFullYear(), now.getMonth() + 1, 1);
  return `on ${next.toLocaleDateString("en-GB", { day: "numeric", month: "long" })}`;
}

/** The amount of a limit, for people, e.g. `2 GB`. */
export function amount({ bytes }: DataCap): string {
  return quantity(bytes, "B").replace(/\.0+ /, " ");
}

/** Counts over all spans, also over several visits; the limit may be set at any time. */
export class DataMeter {
  #visit = { bytes: 0, flops: 0 }; // the device's counters so far
  #worked: number | null = null; // when the device last reported that it works
  #counted: { [span: string]: Counted };

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
  }

  /** Take in a device's counters. */
  count({ down_bytes, up_bytes, flops }: Counts, works: boolean): void {
    const now = this.now();
    const bytes = down_bytes + up_bytes;
    const worked_s = this.#worked === null ? 0 : (now.getTime() - this.#worked) / 1000;
    for (const span of SPANS) {
      const before = this.of(span);
      this.#counted[span] = {
        name: before.name,
        bytes: before.bytes + bytes - this.#visit.bytes,
        flops: before.flops + flops - this.#visit.flops,
        seconds: before.seconds + Math.min(LONGEST_S, Math.max(0, worked_s)),
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
