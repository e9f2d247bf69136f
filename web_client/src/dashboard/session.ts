/** Keeps the model up to date: asks, takes the reply in, lets the page paint, asks again. */

import type { Plain } from "../protocol/messages";
import { Link, type World } from "./link";
import { type Action, EMPTY, type Model, question, reduce, unread } from "./model";
import { readRecords } from "./records";
import { OverviewError, readOverview } from "./overview";
import { logLine } from "./text";

/** From one question to the next, at least. */
const PACE_S = 1;

/** Records of a log that are asked for. */
const LOG_RECORDS = 200;

/** What an operator may do to a job. */
export type Change = "stop" | "pause" | "resume";

const DONE: { readonly [C in Change]: string } = {
  stop: "stopped",
  pause: "paused",
  resume: "queued again",
};

/** What was asked last, and so what the next reply answers. */
type Asked =
  | { readonly kind: "overview" }
  | { readonly kind: "compared"; readonly job: string }
  | { readonly kind: "change"; readonly change: Change }
  | { readonly kind: "log"; readonly job: string };

export interface PageWorld extends World {
  /** Unix time. */
  now_s(): number;
  /** Run once what was rendered last is on the screen; after a while, if nobody looks. */
  painted(run: () => void): void;
}

export class Session {
  private model: Model = EMPTY;
  private readonly link: Link;
  private asked_s = Number.NEGATIVE_INFINITY;
  private cancelWait: () => void = () => {};
  private waiting = false;
  private asked: Asked = { kind: "overview" };
  /** Asked for before the next overview. */
  private readonly wanted: (() => void)[] = [];

  /**
   * @param url of the WebSocket
   * @param token viewer's credential
   * @param render called with every new model, at once
   */
  constructor(
    url: string,
    token: string,
    private readonly render: (model: Model) => void,
    private readonly world: PageWorld,
  ) {
    this.link = new Link(
      url,
      token,
      {
        state: (state) => {
          if (state.kind !== "open") this.stopWaiting();
          this.dispatch({ kind: "link", state });
        },
        ready: () => world.painted(() => this.wait()),
        reply: (data) => this.take(data),
        failed: (text) => this.refused(text),
      },
      world,
    );
  }

  /** Begin. */
  open(): void {
    this.render(this.model);
    this.link.open();
  }

  /** End for good. */
  close(): void {
    this.stopWaiting();
    this.link.close();
  }

  /** Show a device's timeline, or none any more if it was the one. */
  choose(device: number): void {
    this.dispatch({ kind: "choose", device });
    if (this.waiting) this.ask();
  }

  /** Draw a job's losses next to the current one's, or not any more. */
  compare(job: string): void {
    this.dispatch({ kind: "compare", job });
    if (this.waiting) this.ask();
  }

  /** Change a job, as an operator. */
  change(change: Change, job: string): void {
    this.want({ kind: "change", change }, change, { job });
  }

  /** Show a job's last records, as an operator; "": none any more. */
  showLog(job: string): void {
    if (job === "") this.dispatch({ kind: "log", log: null });
    else this.want({ kind: "log", job }, "records", { job, last: LOG_RECORDS });
  }

  private want(asked: Asked, action: string, args: { [name: string]: Plain }): void {
    this.wanted.push(() => {
      this.asked = asked;
      this.link.request(action, args);
    });
    if (this.waiting) this.ask();
  }

  private refused(text: string): void {
    const { asked } = this;
    if (asked.kind === "overview") this.dispatch({ kind: "failed", text });
    else if (asked.kind === "compared") this.dispatch({ kind: "compare", job: asked.job });
    else this.dispatch({ kind: "outcome", text });
  }

  private take(data: unknown): void {
    const { asked } = this;
    if (asked.kind === "change") {
      const { job, state } = data as { readonly [name: string]: unknown };
      const ends = state === "running" && asked.change !== "resume";
      const what = ends
        ? `will ${asked.change} after its current step`
        : `was ${DONE[asked.change]}`;
      this.dispatch({ kind: "outcome", text: `${String(job)} ${what}.` });
      return;
    }
    if (asked.kind === "log") {
      const { records } = data as { readonly records?: unknown };
      const lines = Array.isArray(records) ? readRecords(records).map(logLine) : [];
      this.dispatch({ kind: "log", log: { job: asked.job, lines } });
      return;
    }
    try {
      const overview = readOverview(data);
      if (asked.kind === "compared") this.dispatch({ kind: "compared", job: asked.job, overview });
      else this.dispatch({ kind: "overview", overview, received_s: this.world.now_s() });
    } catch (error) {
      if (!(error instanceof OverviewError)) throw error;
      this.dispatch({ kind: "failed", text: error.message });
    }
  }

  private wait(): void {
    this.stopWaiting();
    if (this.model.link.kind !== "open") return;
    const more = this.model.behind || this.wanted.length > 0 || unread(this.model) !== undefined;
    const left_s = more ? 0 : this.asked_s + PACE_S - this.world.now_s();
    this.waiting = true;
    this.cancelWait = this.world.after(Math.min(PACE_S, Math.max(0, left_s)), () => this.ask());
  }

  private ask(): void {
    this.stopWaiting();
    this.asked_s = this.world.now_s();
    const wanted = this.wanted.shift();
    if (wanted !== undefined) {
      wanted();
      return;
    }
    // In turn with the current job, which must not wait for a long one.
    const compared = this.asked.kind === "compared" ? undefined : unread(this.model);
    this.asked =
      compared === undefined ? { kind: "overview" } : { kind: "compared", job: compared };
    this.link.request("overview", question(this.model, compared));
  }

  private stopWaiting(): void {
    this.waiting = false;
    this.cancelWait();
  }

  private dispatch(action: Action): void {
    this.model = reduce(this.model, action);
    this.render(this.model);
  }
}
