/** The join page's parts, as plain functions of what they show. */

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import type { Status } from "../device/commands";
import { State } from "../device/guest";
import { count, quantity } from "../ui/figures";
import type { Conditions, Switches } from "./conditions";
import {
  amount,
  type Counted,
  type DataCap,
  readGigabytes,
  Span,
  STANDARD_CAP,
  WHEN,
} from "./data_use";
import type { Project } from "./project";
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
export function NoCode({ enter }: CodeProps) {
  return (
    <section class="card stack">
      <h1>This page needs a join code</h1>
      <p>
        Scan the QR code or open the link that the server prints. Or type the code here. The person
        who runs the server makes codes with <code>cleave pair</code>. A code admits one device and
        is valid for some minutes.
      </p>
      <CodeForm enter={enter} />
    </section>
  );
}

interface CodeProps {
  /** Called with what was typed: a code, or a link that holds one. */
  readonly enter: (typed: string) => void;
}

function CodeForm({ enter }: CodeProps) {
  const [typed, setTyped] = useState("");
  return (
    <form
      class="stack"
      onSubmit={(event) => {
        event.preventDefault();
        enter(typed);
      }}
    >
      <label class="field">
        <span>Join code or link</span>
        <input
          type="text"
          value={typed}
          autocomplete="off"
          autocapitalize="characters"
          spellcheck={false}
          required
          onInput={(event) => setTyped(event.currentTarget.value)}
        />
      </label>
      <button type="submit" class="button primary wide">
        Use this code
      </button>
    </form>
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
  readonly project: Project;
  readonly name: string;
  readonly onName: (name: string) => void;
  readonly known: boolean;
  readonly secure: boolean;
  /** A link into the app; null where there can be none. */
  readonly app: string | null;
  /** Bytes a second when it helped last; null where that is not known. */
  readonly bytes_per_s: number | null;
  /** The limit of data that is chosen now. */
  readonly cap: DataCap | null;
  readonly start: () => void;
  readonly children: ComponentChildren;
}

/** Before the start: who asks, what will happen, and the owner's choices. */
export function Ready(props: ReadyProps) {
  const { host, project, name, onName, known, secure, app, bytes_per_s, cap, start, children } =
    props;
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
          {project.title === "" ? (
            <>
              A model is being trained on <strong>{host}</strong>.
            </>
          ) : (
            <>
              <strong>{project.title}</strong> asks this device to help train a model on {host}.
            </>
          )}
        </p>
        {project.about === "" ? null : <blockquote>{project.about}</blockquote>}
        <p>
          This device gets blocks of numbers, multiplies them and sends the results back, until you
          stop it or close the page.
        </p>
        <ul class="plain">
          <li>Nothing on this device is read, and nothing is installed.</li>
          <li>It uses power: on a phone, better with a charger.</li>
          <li data-figure="use">
            {bytes_per_s !== null
              ? `It uses data: ${dataUse(bytes_per_s)} when it helped last.`
              : "It uses data, on a fast network gigabytes an hour: better over Wi‑Fi."}{" "}
            {cap === null
              ? "Without a limit, it may use all that your plan has."
              : `It stops after ${amount(cap)} ${SPANS[cap.span]}: change that below.`}
          </li>
          <li>It gets warm; the browser keeps it within its limits.</li>
        </ul>
        {secure ? null : (
          <p class="soft small">
            This page came over http, so it has neither the GPU (WebGPU) nor shared memory for
            threads: layers are computed by one thread. Over https this browser could use both, and
            keep the screen on.
          </p>
        )}
      </section>
      <section class="card stack">
        {known ? null : (
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
        )}
        {children}
      </section>
      {app === null ? null : (
        <p class="soft small">
          Is Cleave's app on this phone? <a href={app}>Open in the app</a>: it works with the screen
          off, too.
        </p>
      )}
      <div class="bottom">
        <button type="submit" class="button primary wide">
          Start helping
        </button>
      </div>
    </form>
  );
}

export interface ChoicesProps extends Pick<CapProps, "refused" | "onRefused"> {
  readonly conditions: Conditions;
  readonly offered: readonly (keyof Switches)[];
  readonly onChange: (conditions: Conditions) => void;
}

/** The owner's conditions, those that this browser can tell. */
export function Choices({ conditions, offered, onChange, refused, onRefused }: ChoicesProps) {
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
      <Cap
        cap={conditions.cap}
        onChange={(cap) => onChange({ ...conditions, cap })}
        refused={refused}
        onRefused={onRefused}
      />
    </fieldset>
  );
}

const GIGABYTE = 1e9;
const SPANS: { readonly [S in Span]: string } = {
  [Span.HOUR]: "an hour",
  [Span.DAY]: "a day",
  [Span.MONTH]: "a month",
};

interface CapProps {
  readonly cap: DataCap | null;
  readonly onChange: (cap: DataCap | null) => void;
  /** Why what was typed is no limit; "" if it is one. The start of the work does not hide it. */
  readonly refused: string;
  readonly onRefused: (text: string) => void;
}

/** The limit of data: whether there is one, how much, and over what time. */
function Cap({ cap, onChange, refused, onRefused }: CapProps) {
  const [latest, setLatest] = useState(cap ?? STANDARD_CAP); // also while it is switched off
  const [typed, setTyped] = useState(String(latest.bytes / GIGABYTE));
  const choose = (chosen: DataCap) => {
    setLatest(chosen);
    setTyped(String(chosen.bytes / GIGABYTE));
    onRefused("");
    onChange(chosen);
  };
  const enter = () => {
    const gigabytes = readGigabytes(typed);
    if (gigabytes === null) {
      const now = `${latest.bytes / GIGABYTE} GB ${SPANS[latest.span]}`;
      setTyped(String(latest.bytes / GIGABYTE));
      onRefused(
        `“${typed}” is not an amount: the limit stays ${now}. Enter a number above 0, and at most 100000.`,
      );
    } else choose({ ...latest, bytes: gigabytes * GIGABYTE });
  };
  return (
    <>
      <div class="choice cap">
        <input
          type="checkbox"
          aria-label="Limit the data"
          checked={cap !== null}
          onChange={(event) => onChange(event.currentTarget.checked ? latest : null)}
        />
        <label for="cap">Stop after</label>
        <input
          id="cap"
          type="text"
          inputMode="decimal"
          autocomplete="off"
          value={typed}
          aria-describedby={refused === "" ? undefined : "refused"}
          onInput={(event) => setTyped(event.currentTarget.value)}
          onChange={enter}
          onKeyDown={(event) => {
            if (event.key !== "Enter") return;
            event.preventDefault(); // it confirms the amount, and does not start the work
            enter();
          }}
        />
        <label for="span">GB</label>
        <select
          id="span"
          value={latest.span}
          onChange={(event) => choose({ ...latest, span: event.currentTarget.value as Span })}
        >
          {Object.values(Span).map((each) => (
            <option key={each} value={each}>
              {SPANS[each]}
            </option>
          ))}
        </select>
      </div>
      <p id="refused" role="alert" class="bad small">
        {refused}
      </p>
    </>
  );
}

/** A use of data, for people. */
function dataUse(bytes_per_s: number): string {
  return `${quantity(60 * bytes_per_s, "B")} a minute, ${quantity(3600 * bytes_per_s, "B")} an hour`;
}

export interface RunningProps {
  readonly status: Status;
  /** This device's share of today's training; "" if unknown. */
  readonly share: string;
  /** What it did today. */
  readonly today: Counted;
  readonly flops_per_s: number;
  /** Whether no work came within the last minute. */
  readonly idle: boolean;
  /** Of data now; null where that is not known yet. */
  readonly bytes_per_s: number | null;
  /** The limit of data and what is used of it; null without a limit. */
  readonly cap: { readonly cap: DataCap; readonly used: number } | null;
  readonly contribution: Contribution;
  readonly load: Load;
  readonly hot: boolean;
  readonly stop: () => void;
  readonly again: () => void;
  readonly enter: CodeProps["enter"];
}

/** While it works, and after. */
export function Running(props: RunningProps) {
  const { status, share, today, bytes_per_s, cap, hot, stop, again, enter } = props;
  const { headline, detail } = said(status, props.idle);
  const { state, code } = status.notice;
  const over = state === State.ENDED;
  return (
    <section class="card stack" data-state={state} data-kernel={status.kernel?.name ?? ""}>
      <div role="status" aria-live="polite" class="stack tight">
        <h1 class={state === State.WORKING ? "working" : ""}>{headline}</h1>
        <p class="soft">{detail}</p>
      </div>
      {share === "" ? null : (
        <p data-figure="share">
          You did <strong>{share}</strong> of today's training.
        </p>
      )}
      {needsCode(code) ? (
        <CodeForm enter={enter} />
      ) : (
        <>
          <dl class="figures">
            <Figure name="Helped today" value={minutes(today.seconds)} id="minutes" />
            {cap === null ? (
              <Figure name="Data today" value={quantity(today.bytes, "B")} id="today" />
            ) : (
              <Figure
                name={`Data ${WHEN[cap.cap.span]}`}
                value={quantity(cap.used, "B")}
                note={`of ${amount(cap.cap)}`}
                id="cap"
              />
            )}
            {hot ? <Figure name="Device" value="hot" id="hot" /> : null}
          </dl>
          {state === State.WORKING && !props.idle && bytes_per_s !== null ? (
            <p class="soft small" data-figure="use">
              It uses {dataUse(bytes_per_s)} now.
            </p>
          ) : null}
          {over ? (
            <button type="button" class="button primary wide" onClick={again}>
              Join again
            </button>
          ) : (
            <button type="button" class="button wide" onClick={stop}>
              {state === State.DRAINING ? "Stop at once" : "Stop"}
            </button>
          )}
        </>
      )}
      <Details {...props} />
    </section>
  );
}

/** What only some owners want to know: operations, bytes, and what multiplies here. */
function Details({ status, flops_per_s, contribution, load }: RunningProps) {
  const { counts, notice } = status;
  const over = notice.state === State.ENDED;
  return (
    <details>
      <summary>Details</summary>
      <dl class="figures">
        <Figure name="Blocks multiplied" value={count(counts.blocks)} id="blocks" />
        <Figure name="Layers computed" value={count(counts.graphs)} id="graphs" />
        <Figure name="Speed" value={quantity(over ? 0 : flops_per_s, "FLOP/s")} id="speed" />
        {load === null ? null : <Figure name="Processor" value={load} id="load" />}
        <Figure name="Received" value={quantity(counts.down_bytes, "B")} id="down" />
        <Figure name="Sent" value={quantity(counts.up_bytes, "B")} id="up" />
        <Figure
          name="Since you first helped"
          value={`${quantity(contribution.flops, "FLOP")}, ${count(contribution.blocks)} blocks`}
          id="contribution"
          wide
        />
      </dl>
      {over ? null : <p class="soft small">Multiplies with {kernelText(status) || "…"}</p>}
      <Unused status={status} />
    </details>
  );
}

/** A span of time in whole minutes, e.g. `42 min`, `1 h 5 min`. */
function minutes(seconds: number): string {
  if (seconds < 60) return "under 1 min";
  const whole = Math.floor(seconds / 60);
  return whole < 60 ? `${whole} min` : `${Math.floor(whole / 60)} h ${whole % 60} min`;
}

interface FigureProps {
  readonly name: string;
  readonly value: string;
  readonly id: string;
  readonly note?: string;
  readonly wide?: boolean;
}

function Figure({ name, value, id, note = "", wide = false }: FigureProps) {
  return (
    <div class={wide ? "row" : ""}>
      <dt>{name}</dt>
      <dd data-figure={id}>
        {value} {note === "" ? null : <span class="note">{note}</span>}
      </dd>
    </div>
  );
}

function Unused({ status }: { status: Status }) {
  if (status.unused.length === 0) return null;
  return (
    <div class="small soft">
      <p>This browser does not use:</p>
      <ul class="plain">
        {status.unused.map(({ name, reason }) => (
          <li key={`${name} ${reason}`}>
            {name}: {reason.replace(/^Error: /, "")}
          </li>
        ))}
      </ul>
    </div>
  );
}
