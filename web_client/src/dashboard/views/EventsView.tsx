/** What happened, newest first; the newest is told to screen readers, politely. */

import { useRef, useState } from "preact/hooks";
import { type Announcement, announce } from "../announce";
import { grouped } from "../eventGroups";
import type { FleetEvent } from "../overview";
import { counted, timeOfDay } from "../text";

const SHOWN = 100;
const TROUBLE = new Set(["quarantine", "wrong"]);
const DELAY = new Set(["overdue", "reissue", "leave", "pause"]);

export function EventsView(props: {
  readonly events: readonly FleetEvent[];
  readonly now_s: number;
}) {
  const { events, now_s } = props;
  const [kind, setKind] = useState("");
  const told = useRef<Announcement | null>(null);
  told.current = announce(told.current, events, now_s);
  const kinds = [...new Set(events.map((event) => event.kind))].sort();
  const wanted = kind === "" ? events : events.filter((event) => event.kind === kind);
  const shown = grouped(wanted).slice(0, SHOWN);
  return (
    <section class="card" aria-labelledby="events">
      <div class="title">
        <h2 id="events">Events</h2>
        <p class="soft small">{counted(wanted.length, "event")}</p>
        <div class="field end">
          <label class="spoken" for="event-kind">
            Kind of event
          </label>
          <select
            id="event-kind"
            value={kind}
            onChange={(event) => setKind(event.currentTarget.value)}
          >
            <option value="">every kind</option>
            {kinds.map((each) => (
              <option key={each} value={each}>
                {each}
              </option>
            ))}
          </select>
        </div>
      </div>
      {shown.length === 0 ? (
        <p class="soft empty">Nothing has happened yet.</p>
      ) : (
        // What scrolls must be reached by keys.
        <section class="scroll events" tabIndex={0} aria-label="Events, newest first">
          <ol>
            {shown.map(({ newest: event, count, since_s }) => (
              <li key={event.id}>
                <time dateTime={new Date(event.time_s * 1000).toISOString()}>
                  {timeOfDay(event.time_s)}
                </time>
                <span class={`kind ${tone(event.kind)}`}>{event.kind}</span>
                <span class="what">
                  {event.text}
                  {count > 1 && (
                    <span class="soft">
                      , {count} times since {timeOfDay(since_s)}
                    </span>
                  )}
                </span>
              </li>
            ))}
          </ol>
        </section>
      )}
      <p class="spoken" aria-live="polite">
        {told.current.text}
      </p>
    </section>
  );
}

function tone(kind: string): string {
  if (TROUBLE.has(kind)) return "bad";
  return DELAY.has(kind) ? "warning" : "soft";
}
