/** Events of a device put together, so that one that is late forty times is one line. Pure. */

import type { FleetEvent } from "./overview";

export interface EventGroup {
  readonly newest: FleetEvent;
  readonly count: number;
  /** Unix time of the oldest. */
  readonly since_s: number;
}

/** Events of one kind and one device as one group, the newest first; those of none (0) alone. */
export function grouped(events: readonly FleetEvent[]): EventGroup[] {
  const groups = new Map<string, EventGroup>();
  for (let i = events.length - 1; i >= 0; i -= 1) {
    const event = events[i];
    if (event === undefined) continue;
    const key = !event.device ? `event ${event.id}` : `${event.kind} ${event.device}`;
    const known = groups.get(key);
    groups.set(key, {
      newest: known?.newest ?? event,
      count: (known?.count ?? 0) + 1,
      since_s: event.time_s,
    });
  }
  return [...groups.values()];
}
