/** The join page's parts, as plain functions of what they show. */

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import type { Status } from "../device/commands";
import { State } from "../device/guest";
import { count, quantity } from "../ui/figures";
import { type Conditions, offered, type Surroundings, type Switches } from "./conditions";
import {
  amount,
  type Counted,
  type DataCap,
  EACH,
  isUnfinished,
  lasting,
  readGigabytes,
  refusedGigabytes,
  Span,
  STANDARD_CAP,
  WHEN,
} from "./data_use";
import { testMegabytes, type Thing } from "./names";
import { mayTrainLayers, otherHelpers, Outlook, type Project, UNKNOWN } from "./project";
import type { Contribution } from "./saved";
import {
  kernelText,
  KERNELS,
  needsCode,
  type Said,
  said,
  type Situation,
  whoseWork,
} from "./words";

const CHOICES: { readonly [K in keyof Switches]: string } = {
  lowBattery: "the battery is below 20\u00a0%",
  unplugged: "it is not charging",
  hot: "it is hot",
  hidden: "this page is not in front",
  metered: "it is on mobile data or a metered network",
};

/** There is no code in the address, and none was used here before; or the key admits nobody. */
export function NoCode({ enter, dead = null }: CodeProps & { readonly dead?: Said | null }) {
  return (
    <section class="card stack">
      <h1>{dead?.headline ?? "Open the link that you were sent"}</h1>
      <p>
        {dead?.detail ??
          "This page lends a phone or computer to somebody who trains an AI model. " +
            "It opens with their link or QR code."}
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
        <span>Link or code</span>
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
        Use this link
      </button>
    </form>
  );
}

/** A page that cannot go on, why, and how it may after all. */
export function Fault({ text, again }: { text: string; again: (() => void) | null }) {
  return (
    <section class="card stack" role="alert">
      <h1>This does not work</h1>
      <p>{text}</p>
      {again === null ? null : (
        <button type="button" class="button primary wide" onClick={again}>
          Try again
        </button>
      )}
    </section>
  );
}

export interface ReadyProps {
  readonly host: string;
  readonly project: Project;
  /** What this device may expect of the training that runs. */
  readonly outlook: Outlook;
  readonly thing: Thing;
  readonly name: string;
  readonly onName: (name: string) => void;
  /** Whether this browser has helped this server before. */
  readonly known: boolean;
  readonly contribution: Contribution;
  readonly secure: boolean;
  /** Whether the browser can keep the screen on. */
  readonly keepsScreen: boolean;
  readonly around: Surroundings;
  readonly conditions: Conditions;
  /** A link into the app; null where there can be none. */
  readonly app: string | null;
  /** Bytes a second when it helped last; null where that is not known. */
  readonly bytes_per_s: number | null;
  /** Bytes that were used of the limit's span. */
  readonly used: number;
  readonly start: () => void;
  readonly forget: () => void;
  readonly children: ComponentChildren;
}

/** Before the start: who asks, what will happen, and the owner's choices. */
export function Ready(props: ReadyProps) {
  const { host, project, thing, name, onName, known, contribution, secure, around } = props;
  const { conditions, app, start, children } = props;
  const who = project.title || "the sender";
  const waits = whatItWaitsFor(project, props.outlook);
  return (
    <form
      class="stack"
      onSubmit={(event) => {
        event.preventDefault();
        start();
      }}
    >
      <section class="card stack">
        <h1>{known ? "Help again" : `Lend this ${thing}`}</h1>
        {known && contribution.seconds >= 60 ? (
          <p data-figure="so-far">
            This {thing} has helped for {minutes(contribution.seconds)} so far. Thank you!
          </p>
        ) : null}
        {project.title === "" ? (
          <p>
            Somebody asks this {thing} to help train an AI model.
            {project === UNKNOWN ? "" : " They did not say who they are."} The link leads to{" "}
            <strong>{host}</strong>.
          </p>
        ) : (
          <p>
            <strong>{project.title}</strong> asks this {thing} to help train an AI model. The link
            leads to {host}.
          </p>
        )}
        {project.about === "" ? null : <blockquote>{project.about}</blockquote>}
        <p>
          {mayTrainLayers(project)
            ? `This ${thing} gets parts of the model and of the texts that it learns from, ` +
              "as numbers. It computes with them"
            : `This ${thing} gets tables of numbers, multiplies them`}{" "}
          and sends the results back, until you stop it or close the page.
        </p>
        <ul class="plain">
          <li>It reads no files, photos or messages: no page can. It installs nothing.</li>
          <li>
            It uses power and gets warm{thing === "computer" ? "." : ": better with a charger."}
          </li>
          <li data-figure="use">{dataUse(props)}</li>
          <li>
            When it connects, it tests the connection
            {thing === "computer" ? "" : ", usually once a day"}. A test uses up to{" "}
            {testMegabytes(thing)}&nbsp;MB.
          </li>
          {thing === "computer" ? null : (
            <li>
              {props.keepsScreen
                ? "It keeps the screen on. If the screen locks, helping pauses."
                : "If the screen locks, helping pauses. Set the screen to stay on."}
            </li>
          )}
          {conditions.hidden ? null : <li>It also works while this page is not in front.</li>}
          {waits === "" ? null : <li data-figure="waits">{waits}</li>}
        </ul>
        <details>
          <summary>What does {who} see?</summary>
          <ul class="plain">
            <li>
              {known ? "its name" : "the name below"}, and that it is a {thing}
            </li>
            <li>
              this {thing}'s address on the network, and the kind of browser, as every page does
            </li>
            <li>its speed, and how much memory it offers</li>
            {around.battery ? <li>the battery's level, every minute</li> : null}
            <li>when it helps, and what it computed</li>
          </ul>
          {secure ? null : (
            <p>
              This connection is not encrypted: others on the network can read along. So the browser
              offers neither the GPU (WebGPU) nor shared memory, and the screen may lock.
            </p>
          )}
          {known ? (
            <>
              <p>
                This browser keeps a key, your settings and its counts. Forgetting removes them, but
                the data of this month stay counted. {who} still sees the name in the list of
                earlier devices.
              </p>
              <Forget thing={thing} who={who} forget={props.forget} />
            </>
          ) : null}
        </details>
      </section>
      <section class="card stack">
        {known ? null : (
          <label class="field">
            <span>Name that {who} sees</span>
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
      <button type="submit" class="button primary wide">
        {startText(conditions, around)}
      </button>
      {app === null ? null : (
        <p class="soft small">
          Is Cleave's app on this {thing}? <a href={app}>Open in the app</a>: it works with the
          screen off, too.
        </p>
      )}
    </form>
  );
}

/** Forgets the device once its owner has confirmed what that means. */
function Forget({ thing, who, forget }: { thing: Thing; who: string; forget: () => void }) {
  const [asks, setAsks] = useState(false);
  const question = useRef<HTMLParagraphElement>(null);
  useEffect(() => question.current?.focus(), [asks]);
  if (!asks) {
    return (
      <button type="button" class="button" onClick={() => setAsks(true)}>
        Forget this {thing}…
      </button>
    );
  }
  return (
    <div class="stack tight" role="group" aria-label={`Forget this ${thing}`}>
      <p ref={question} tabIndex={-1}>
        Then this {thing} can only help again with a new link from {who}.
      </p>
      <button type="button" class="button" onClick={() => setAsks(false)}>
        Keep it
      </button>
      <button type="button" class="button" onClick={forget}>
        Forget it
      </button>
    </div>
  );
}

/** Why there would be no work after the start, for people; "" where nothing is known of that. */
function whatItWaitsFor(project: Project, outlook: Outlook): string {
  if (project === UNKNOWN) return "";
  switch (project.training.state) {
    case "running":
      break;
    case "queued":
      return "The training has not started yet: it would wait for that.";
    case "paused":
      return "The training is paused: it would wait until that continues.";
    default:
      return "There is no training at the moment: it would wait for the next one.";
  }
  switch (outlook) {
    case Outlook.WORK:
      return "";
    case Outlook.ALONE:
      return "The training runs without helpers at the moment: it would wait for work.";
    default:
      return `${whoseWork(otherHelpers(project), project.title)} It would wait for other work.`;
  }
}

/** What the button says: nothing begins on mobile data by surprise. */
function startText({ metered }: Conditions, around: Surroundings): string {
  if (!around.metered) return "Start helping";
  return metered ? "Start when on Wi‑Fi" : "Start on mobile data";
}

/** What is known of the use of data before the start. */
function dataUse(props: ReadyProps): string {
  const { project, thing, around, bytes_per_s, used } = props;
  const { cap } = props.conditions;
  const { usual_bytes_per_device_s } = project.training;
  const bytes_per_device_s = project.training.bytes_per_device_s || null; // 0 tells nothing
  const per_s = bytes_per_device_s ?? bytes_per_s ?? usual_bytes_per_device_s;
  const said = ["It can use a lot of data. How much depends on the training."];
  if (bytes_per_device_s !== null) {
    said[0] = `It uses data: each device that helps now moves about ${perMinute(bytes_per_device_s)}.`;
  } else if (bytes_per_s !== null) {
    said[0] = `It uses data: about ${perMinute(bytes_per_s)} when it helped last.`;
  } else if (usual_bytes_per_device_s !== null) {
    said[0] = `It uses data: devices that helped before moved about ${perMinute(usual_bytes_per_device_s)}.`;
  }
  if (cap === null) said.push("Without a limit, it may use all that your plan has.");
  else {
    const rest = per_s ? lasting(cap, used, per_s, new Date()) : null;
    const after = rest === null ? "" : `, at this rate in ${rest}`;
    const most = amount(cap.bytes).replace(" ", "\u00a0");
    said.push(`It stops after ${most} ${EACH[cap.span]}${after}: change that below.`);
  }
  if (thing !== "computer" && around.metered === null) {
    said.push("This browser does not tell mobile data from Wi‑Fi: make sure you are on Wi‑Fi.");
  }
  return said.join(" ");
}

function perMinute(bytes_per_s: number): string {
  return `${amount(60 * bytes_per_s)} a minute`;
}

export interface ChoicesProps {
  readonly conditions: Conditions;
  readonly around: Surroundings;
  readonly thing: Thing;
  readonly onChange: (conditions: Conditions) => void;
}

/** The owner's conditions, those that this browser can tell. */
export function Choices({ conditions, around, thing, onChange }: ChoicesProps) {
  return (
    <fieldset class="choices">
      <legend>Pause when…</legend>
      {offered(around).map((name) => (
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
      {around.battery === null && thing !== "computer" ? (
        <p class="soft small">This browser does not tell the battery's level: keep an eye on it.</p>
      ) : null}
    </fieldset>
  );
}

const GIGABYTE = 1e9;

interface CapProps {
  readonly cap: DataCap | null;
  readonly onChange: (cap: DataCap | null) => void;
}

/** The limit of data: whether there is one, how much, and over what time. */
function Cap({ cap, onChange }: CapProps) {
  const [latest, setLatest] = useState(cap ?? STANDARD_CAP); // also while it is switched off
  const [typed, setTyped] = useState(String(latest.bytes / GIGABYTE));
  const [refused, setRefused] = useState("");
  const choose = (chosen: DataCap) => {
    setLatest(chosen);
    onChange(chosen);
  };
  const reset = () => {
    setTyped(String(latest.bytes / GIGABYTE));
    setRefused("");
  };
  const enter = (value: string) => {
    const gigabytes = readGigabytes(value);
    if (gigabytes !== null) choose({ ...latest, bytes: gigabytes * GIGABYTE });
    setRefused(gigabytes === null ? refusedGigabytes(value, latest) : "");
  };
  return (
    <>
      <div class="choice cap">
        <input
          type="checkbox"
          aria-label="Limit the data"
          checked={cap !== null}
          onChange={(event) => {
            reset();
            onChange(event.currentTarget.checked ? latest : null);
          }}
        />
        <label for="cap">data over</label>
        <input
          id="cap"
          type="text"
          inputMode="decimal"
          autocomplete="off"
          value={typed}
          disabled={cap === null}
          aria-invalid={refused !== ""}
          aria-describedby={refused === "" ? undefined : "refused"}
          onInput={({ currentTarget: { value } }) => {
            setTyped(value);
            const fine = readGigabytes(value) !== null || isUnfinished(value);
            setRefused(fine ? "" : refusedGigabytes(value, latest));
          }}
          onBlur={({ currentTarget: { value }, relatedTarget: next }) => {
            // A message would move the button away from under the finger: the limit stays.
            if (readGigabytes(value) === null && next instanceof HTMLButtonElement) reset();
            else enter(value);
          }}
          onKeyDown={(event) => {
            if (event.key !== "Enter") return;
            event.preventDefault(); // it confirms the amount, and does not start the work
            enter(event.currentTarget.value);
          }}
        />
        <label for="span">GB</label>
        <select
          id="span"
          value={latest.span}
          disabled={cap === null}
          onChange={(event) => choose({ ...latest, span: event.currentTarget.value as Span })}
        >
          {Object.values(Span).map((each) => (
            <option key={each} value={each}>
              {EACH[each]}
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

export interface RunningProps {
  readonly status: Status;
  readonly now: Situation;
  /** This device's share of today's training, in words; "" if unknown. */
  readonly share: string;
  /** What it did today. */
  readonly today: Counted;
  readonly flops_per_s: number;
  /** Of data now; null where that is not known, or there is no work. */
  readonly bytes_per_s: number | null;
  /** The same over the last minutes. */
  readonly average_bytes_per_s: number | null;
  /** The limit of data and what is used of it; null without a limit. */
  readonly cap: { readonly cap: DataCap; readonly used: number } | null;
  readonly contribution: Contribution;
  readonly hot: boolean;
  readonly stop: () => void;
  readonly again: () => void;
  /** Go back to what is shown before the start. */
  readonly settings: () => void;
  /** Try the server again at once. */
  readonly retry: () => void;
  readonly enter: CodeProps["enter"];
  readonly children: ComponentChildren;
}

/** While it works, and after. */
export function Running(props: RunningProps) {
  const { status, now, share, today, bytes_per_s, average_bytes_per_s, cap, hot } = props;
  const { stop, again, settings, retry, enter } = props;
  const { headline, detail } = said(status, now);
  const { state, code } = status.notice;
  const over = state === State.ENDED;
  const rest =
    cap === null || average_bytes_per_s === null
      ? null
      : lasting(cap.cap, cap.used, average_bytes_per_s, new Date());
  return (
    <>
      <section class="card stack" data-state={state} data-kernel={status.kernel?.name ?? ""}>
        <div role="status" aria-live="polite" class="stack tight">
          <h1 class={state === State.WORKING && now.helps && now.online ? "working" : ""}>
            {headline}
          </h1>
          {/* A reader hears the state once, and not each second of a wait. */}
          <p class="soft" aria-live={state === State.WAITING ? "off" : undefined}>
            {detail}
          </p>
        </div>
        {state === State.WAITING && now.online ? (
          <button type="button" class="button primary wide" onClick={retry}>
            Try again now
          </button>
        ) : null}
        {share === "" ? null : <p data-figure="share">{share}</p>}
        {needsCode(code) ? (
          <CodeForm enter={enter} />
        ) : (
          <dl class="figures">
            <Figure name="Helped today" value={minutes(today.seconds)} id="minutes" />
            {cap === null ? (
              <Figure name="Data today" value={amount(today.bytes)} id="today" />
            ) : (
              <Figure
                name={`Data ${WHEN[cap.cap.span]}`}
                value={amount(cap.used)}
                note={`of ${amount(cap.cap.bytes)}`}
                id="cap"
              />
            )}
            {hot ? <Figure name="Heat" value="hot" id="hot" /> : null}
          </dl>
        )}
        {state === State.WORKING && now.helps && bytes_per_s !== null ? (
          <p class="soft small" data-figure="use">
            It uses {perMinute(bytes_per_s)} now.
            {rest === null ? "" : ` Your limit is reached in ${rest}.`}
          </p>
        ) : null}
        {over && !needsCode(code) ? (
          <>
            <button type="button" class="button primary wide" onClick={again}>
              {now.helped ? "Help again" : "Help here"}
            </button>
            <button type="button" class="button wide" onClick={settings}>
              Settings
            </button>
          </>
        ) : null}
        <Details {...props} />
      </section>
      {over ? null : (
        <>
          <section class="card">{props.children}</section>
          <div class="bottom">
            <button type="button" class="button wide" onClick={stop}>
              {state === State.DRAINING ? "Stop at once" : "Stop"}
            </button>
          </div>
        </>
      )}
    </>
  );
}

/** What only some owners want to know: operations, bytes, and what multiplies here. */
function Details({ status, flops_per_s, contribution }: RunningProps) {
  const { counts, notice } = status;
  const over = notice.state === State.ENDED;
  return (
    <details>
      <summary>Technical details</summary>
      <p class="soft small">Since the last start:</p>
      <dl class="figures">
        <Figure name="Tasks done" value={count(counts.blocks)} id="blocks" />
        <Figure name="Of these, layers" value={count(counts.graphs)} id="graphs" />
        <Figure name="Received" value={amount(counts.down_bytes)} id="down" />
        <Figure name="Sent" value={amount(counts.up_bytes)} id="up" />
        <Figure
          name="Operations a second (FLOP/s)"
          value={quantity(over ? 0 : flops_per_s, "FLOP/s")}
          id="speed"
          wide
        />
        <Figure
          name="In all, since you first helped"
          value={`${quantity(contribution.flops, "FLOP")}, ${count(contribution.blocks)} tasks`}
          id="contribution"
          wide
        />
      </dl>
      {over ? null : <p class="soft small">Computes with {kernelText(status) || "…"}</p>}
      <Unused status={status} />
      {notice.state === State.WAITING && notice.reason ? (
        <p class="soft small">Why it is not connected: {notice.reason}</p>
      ) : null}
    </details>
  );
}

/** A span of time in whole minutes, e.g. `42 min`, `1 h 5 min`. */
function minutes(seconds: number): string {
  if (seconds === 0) return "0 min";
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
            {KERNELS[name]} ({name}): {reason.replace(/^Error: /, "")}
          </li>
        ))}
      </ul>
    </div>
  );
}
