/** Pages and lines for when there is nothing to show, or not what is now. */

import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { duration } from "../../ui/figures";
import { type JobModel, lacksDevices, type Model } from "../model";
import { timeOfDay } from "../text";

export function Notice(props: { readonly title: string; readonly children: ComponentChildren }) {
  return (
    <main class="notice">
      <section class="card" role="status">
        <h1>{props.title}</h1>
        {props.children}
      </section>
    </main>
  );
}

export function TokenMissing() {
  return (
    <Notice title="This page needs its token">
      <p>
        The dashboard's address ends in <code>#c=…</code>; without that part the server shows
        nothing. Run this where the server runs, and open the address that it prints:
      </p>
      <pre>cleave dashboard</pre>
      <p class="soft">
        To make this machine a device, open the address of a join code (<code>cleave pair</code>).
      </p>
    </Notice>
  );
}

export function Refused(props: { readonly code: string; readonly text: string }) {
  const ofToken = props.code === "credential";
  return (
    <Notice title={ofToken ? "The server refused the token" : "The server refused this page"}>
      <p>It says: {props.text}</p>
      {ofToken ? (
        <p>
          Print the address with the token that is valid now, and open it:{" "}
          <code>cleave dashboard</code>
        </p>
      ) : (
        <p>
          Load the page again; if that does not help, server and page are of different versions.
        </p>
      )}
    </Notice>
  );
}

export function Connecting(props: { readonly model: Model }) {
  const { link, failure } = props.model;
  return (
    <Notice title={link.kind === "waiting" ? "No connection to the server" : "Connecting"}>
      {failure !== "" && <p>The server says: {failure}</p>}
      {link.kind === "waiting" ? (
        <p>Is it running? This page tries again by itself.</p>
      ) : (
        <p class="soft">Asking the server for its figures.</p>
      )}
    </Notice>
  );
}

/** Says that the figures are old, and how old, while there is no connection. */
export function Stale(props: { readonly model: Model }) {
  const { link, received_s, failure } = props.model;
  const gone = link.kind !== "open";
  const age_s = useAge(gone, received_s);
  if (!gone && failure === "") return null;
  return (
    <div class="banner" role="status">
      {gone
        ? `No connection to the server. These figures are from ${timeOfDay(received_s)}`
        : `The server did not answer: ${failure}. These figures are from ${timeOfDay(received_s)}`}
      {gone && <span aria-hidden="true">, {duration(age_s)} ago</span>}. Trying again.
    </div>
  );
}

/** Says that a job waits, as for devices or for room on a disk: nothing goes on without it. */
export function Waiting(props: { readonly job: JobModel }) {
  const { waits } = props.job;
  if (waits === "") return null;
  return (
    <div class="banner" role="status">
      <b>Waiting.</b> {sentence(waits)}
      {lacksDevices(props.job) && (
        <>
          {" "}
          A join code for one: <code>cleave pair</code>.
        </>
      )}
    </div>
  );
}

function sentence(text: string): string {
  const whole = text.slice(0, 1).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}

/** Seconds since, counted while `counting`. */
function useAge(counting: boolean, since_s: number): number {
  const [now_s, setNow] = useState(since_s);
  useEffect(() => {
    if (!counting) return;
    const read = () => setNow(Date.now() / 1000);
    read();
    const timer = setInterval(read, 1000);
    return () => clearInterval(timer);
  }, [counting]);
  return Math.max(0, now_s - since_s);
}
