/** How many bytes this browser sent and received over hours, days and months, and their limit. */

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

/** Bytes of the span of this name. */
export interface Counted {
  readonly name: string;
  readonly bytes: number;
}

const WHEN: { readonly [S in Span]: string } = {
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

/** A limit as it was kept or typed; null where it is none. */
export function readCap(cap: unknown): DataCap | null {
  const { bytes, span } = (cap ?? {}) as Partial<DataCap>;
  if (!Number.isFinite(bytes) || !bytes || bytes < 0) return null;
  return span && SPANS.includes(span) ? { bytes, span } : null;
}

/** Why no more data may be used now, for people; null if it may. */
export function overCap(cap: DataCap | null, used: number): string | null {
  if (!cap || used < cap.bytes) return null;
  return `Your limit of ${quantity(cap.bytes, "B")} ${WHEN[cap.span]} is reached.`;
}

/** How much of a limit is used, for people. */
export function ofCap(cap: DataCap, used: number): string {
  return `${quantity(used, "B")} of ${quantity(cap.bytes, "B")} ${WHEN[cap.span]}`;
}

/** Counts bytes over all spans, also over several visits; the limit may be set at any time. */
export class DataMeter {
  #visit = 0; // bytes of the device's counters so far
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
    this.#visit = 0;
  }

  /** Take in a device's counters. */
  count({ down_bytes, up_bytes }: Counts): void {
    const more = down_bytes + up_bytes - this.#visit;
    this.#visit += more;
    for (const span of SPANS) {
      const name = spanName(span, this.now());
      this.#counted[span] = { name, bytes: this.used(span) + more };
    }
  }

  /** Bytes of the span that is now. */
  used(span: Span): number {
    const counted = this.#counted[span];
    return counted?.name === spanName(span, this.now()) ? counted.bytes : 0;
  }

  /** Write them down. */
  keep(): void {
    this.saved.keepDataUse(this.#counted);
  }
}
