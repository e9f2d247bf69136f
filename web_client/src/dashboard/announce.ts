/** What a screen reader is told of the events: seldom, and several in one sentence. Pure. */

import type { FleetEvent } from "./overview";
import { counted } from "./text";

const QUIET_S = 5;

export interface Announcement {
  /** The newest event that was told of or is too old to tell. */
  readonly last: number;
  /** Server's time when something was told; 0: never. */
  readonly told_s: number;
  readonly text: string;
}

/**
 * The announcement after these events.
 *
 * @param before null at first: what happened before the page was opened is not told
 * @param events all that are known, oldest first
 * @param now_s the server's clock, Unix time
 */
export function announce(
  before: Announcement | null,
  events: readonly FleetEvent[],
  now_s: number,
): Announcement {
  const last = events.at(-1)?.id ?? 0;
  if (before === null || last < before.last) return { last, told_s: 0, text: "" };
  if (last === before.last || now_s - before.told_s < QUIET_S) return before;
  return { last, told_s: now_s, text: sentence(events.filter((event) => event.id > before.last)) };
}

function sentence(events: readonly FleetEvent[]): string {
  const [only] = events;
  if (events.length === 1 && only !== undefined) return only.text;
  const kinds = new Map<string, number>();
  for (const event of events) kinds.set(event.kind, (kinds.get(event.kind) ?? 0) + 1);
  const parts = [...kinds].map(([kind, number]) => `${number} ${kind}`);
  return `${counted(events.length, "event")}: ${parts.join(", ")}`;
}
