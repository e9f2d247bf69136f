/** The join page's parts, as plain functions of what they show. */

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import type { Status } from "../device/commands";
import { State } from "../device/guest";
import { count, quantity } from "../ui/figures";
import type { Conditions, Switches } from "./conditions";
import { type DataCap, ofCap, readCap, Span } from "./data_use";
import type { Contribution } from "./saved";
import type { Load } from "./sensors";
import { kernelText, needsCode, said } from "./words";

const CHOICES: { readonly [K in keyof Switches]: string } = {
  lowBattery: "Stop below 20 % battery",
  unplugged: "Work only while charging",
  hot: "Stop when the device is hot",
  hidden: "Stop when this page is not in front",
  metered: "Stop on a metered network",
};

/** There is no code in the address, and none was used here before. */
export function NoCode() {
  return (
    <section class="card stack">
      <h1>This page needs a join code</h1>
      <p>
        Open it from the QR code or the link that the server prints. Whoever runs the server gets
        one with <code>cleave pair</code>; each is for one device, and good for some minutes.
      </p>
    </section>
  );
}

/** A page that cannot go on, and why. */
export function Fault({ text }: { text: string }) {
  return (
    <section class="card stack" role="alert">
      <h1>This does not work</h1>
      <p>{text}</p>
    </section>
  );
}

export interface ReadyProps {
  readonly host: string;
  readonly name: string;
  readonly onName: (name: string) => void;
  readonly known: boolean;
  readonly secure: boolean;
  /** A link into the app; null where there can be none. */
  readonly app: string | null;
  /** Bytes a second when it helped last; null where that is not known. */
  readonly bytes_per_s: number | null;
  readonly start: () => void;
  readonly children: ComponentChildren;
}

/** Before the start: what will happen. */
export function Ready(props: ReadyProps) {
  const { host, name, onName, known, secure, app, bytes_per_s, start, children } = props;
  return (
    <form
      class="stack"
      onSubmit={(event) => {
        event.preventDefault();
        start();
      }}
    >
      <section class="card stack">
        <h1>{known ? "Help again" : "Lend this device"}</h1>
        <p>
          A model is being trained on <strong>{host}</strong>. This device gets blocks of numbers,
          multiplies them and sends the results back, until you stop it or close the page.
        </p>
        <ul class="plain">
          <li>Nothing on this device is read, and nothing is installed.</li>
          <li>It uses power: on a phone, better with a charger.</li>
          <li data-figure="use">
            {bytes_per_s !== null
              ? `It uses data: ${dataUse(bytes_per_s)} when it helped last.`
              : "It uses data, on a fast network gigabytes an hour: better over Wi-Fi. How much is shown while it works, and you can set a limit below."}
          </li>
          <li>It gets warm; the browser keeps it within its limits.</li>
        </ul>
        <button type="submit" class="button primary wide">
          Start helping
        </button>
        {app === null ? null : (
          <p class="soft small">
            Is Cleave's app on this phone? <a href={app}>Open in the app</a>: it works with the
            screen off, too.
          </p>
        )}
        {secure ? null : (
          <p class="soft small">
            This page came over http, so it has neither the GPU (WebGPU) nor shared memory for
            threads: layers are computed by one thread. Over https this browser could use both, and
            keep the screen on.
          </p>
        )}
      </section>
      <section class="card stack">
        <label class="field">
          <span>Name in the server's list</span>
          <input
            type="text"
            value={name}
            maxLength={100}
            autocomplete="off"
            onInput={(event) => onName(event.currentTarget.value)}
          />
        </label>
        {children}
      </section>
    </form>
  );
}

export interface ChoicesProps {
  readonly conditions: Conditions;
  readonly offered: readonly (keyof Switches)[];
  readonly onChange: (conditions: Conditions) => void;
}

/** The owner's conditions, those that this browser can tell. */
export function Choices({ conditions, offered, onChange }: ChoicesProps) {
  return (
    <fieldset class="choices">
      <legend>When to stop by itself</legend>
      {offered.map((name) => (
        <label key={name} class="choice">
          <input
            type="checkbox"
            checked={conditions[name]}
            onChange={(event) => onChange({ ...conditions, [name]: event.currentTarget.checked })}
          />
          <span>{CHOICES[name]}</span>
        </label>
      ))}
      <Cap cap={conditions.cap} onChange={(cap) => onChange({ ...conditions, cap })} />
    </fieldset>
  );
}

const GIGABYTE = 1e9;
const SPANS: { readonly [S in Span]: string } = {
  [Span.HOUR]: "an hour",
  [Span.DAY]: "a day",
  [Span.MONTH]: "a month",
};

/** The limit of data; an empty field is none. */
function Cap({ cap, onChange }: { cap: DataCap | null; onChange: (cap: DataCap | null) => void }) {
  const [span, setSpan] = useState(cap?.span ?? Span.DAY);
  const [typed, setTyped] = useState(cap ? String(cap.bytes / GIGABYTE) : "");
  const set = (span: Span) => onChange(readCap({ bytes: Number(typed) * GIGABYTE, span }));
  return (
    <div class="choice cap">
      <label for="cap">Stop after</label>
      <input
        id="cap"
        type="number"
        inputMode="decimal"
        min="0.01"
        step="any"
        placeholder="none"
        value={typed}
        onInput={(event) => setTyped(event.currentTarget.value)}
        onChange={() => set(span)}
      />
      <label for="span">GB</label>
      <select
        id="span"
        value={span}
        onChange={(event) => {
          const chosen = event.currentTarget.value as Span;
          setSpan(chosen);
          set(chosen);
        }}
      >
        {Object.values(Span).map((each) => (
          <option key={each} value={each}>
            {SPANS[each]}
          </option>
        ))}
      </select>
    </div>
  );
}

/** What a use of data comes to, for people; a dash where it is not known. */
function dataUse(bytes_per_s: number | null): string {
  if (bytes_per_s === null) return "–";
  return `${quantity(60 * bytes_per_s, "B")} a minute, ${quantity(3600 * bytes_per_s, "B")} an hour`;
}

export interface RunningProps {
  readonly status: Status;
  readonly flops_per_s: number;
  /** Of data now; null where that is not known yet. */
  readonly bytes_per_s: number | null;
  /** The limit of data and what is used of it; null without a limit. */
  readonly cap: { readonly cap: DataCap; readonly used: number } | null;
  readonly contribution: Contribution;
  readonly load: Load;
  readonly hot: boolean;
  readonly stop: () => void;
  readonly again: () => void;
}

/** While it works, and after. */
export function Running(props: RunningProps) {
  const { status, flops_per_s, bytes_per_s, cap, contribution, load, hot, stop, again } = props;
  const { headline, detail } = said(status);
  const { state, code } = status.notice;
  const over = state === State.ENDED;
  return (
    <section class="card stack" data-state={state} data-kernel={status.kernel?.name ?? ""}>
      <div role="status" aria-live="polite" class="stack tight">
        <h1 class={state === State.WORKING ? "working" : ""}>{headline}</h1>
        <p class="soft">{detail}</p>
      </div>
      <dl class="figures">
        <Figure name="Blocks multiplied" value={count(status.counts.blocks)} id="blocks" />
        {status.counts.graphs === 0 ? null : (
          <Figure name="Layers computed" value={count(status.counts.graphs)} id="graphs" />
        )}
        <Figure name="Speed" value={quantity(over ? 0 : flops_per_s, "FLOP/s")} id="speed" />
        <Figure name="Received" value={quantity(status.counts.down_bytes, "B")} id="down" />
        <Figure name="Sent" value={quantity(status.counts.up_bytes, "B")} id="up" />
        {load === null ? null : <Figure name="Processor" value={load} id="load" />}
        {hot ? <Figure name="Device" value="hot" id="hot" /> : null}
        {over ? null : <Figure name="Data" value={dataUse(bytes_per_s)} id="use" wide />}
        {cap === null ? null : (
          <Figure name="Of your limit" value={ofCap(cap.cap, cap.used)} id="cap" wide />
        )}
        <Figure
          name="Contribution so far"
          value={`${quantity(contribution.flops, "FLOP")}, ${count(contribution.blocks)} blocks`}
          id="contribution"
          wide
        />
      </dl>
      {over ? null : <p class="soft small">Multiplies with {kernelText(status) || "…"}</p>}
      {over ? (
        needsCode(code) ? null : (
          <button type="button" class="button primary wide" onClick={again}>
            Join again
          </button>
        )
      ) : (
        <button type="button" class="button wide" onClick={stop}>
          {state === State.DRAINING ? "Stop at once" : "Stop"}
        </button>
      )}
      <Unused status={status} />
    </section>
  );
}

interface FigureProps {
  readonly name: string;
  readonly value: string;
  readonly id: string;
  readonly wide?: boolean;
}

function Figure({ name, value, id, wide = false }: FigureProps) {
  return (
    <div class={wide ? "row" : ""}>
      <dt>{name}</dt>
      <dd data-figure={id}>{value}</dd>
    </div>
  );
}

function Unused({ status }: { status: Status }) {
  if (status.unused.length === 0) return null;
  return (
    <details class="small soft">
      <summary>What this browser does not use</summary>
      <ul class="plain">
        {status.unused.map(({ name, reason }) => (
          <li key={`${name} ${reason}`}>
            {name}: {reason.replace(/^Error: /, "")}
          </li>
        ))}
      </ul>
    </details>
  );
}
