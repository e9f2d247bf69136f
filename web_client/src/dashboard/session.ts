/** Keeps the model up to date: asks, takes the reply in, lets the page paint, asks again. */

import { Link, type World } from "./link";
import { type Action, EMPTY, type Model, question, reduce } from "./model";
import { OverviewError, readOverview } from "./overview";

/** From one question to the next, at least. */
const PACE_S = 1;

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
        failed: (text) => this.dispatch({ kind: "failed", text }),
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

  private take(data: unknown): void {
    try {
      const overview = readOverview(data);
      this.dispatch({ kind: "overview", overview, received_s: this.world.now_s() });
    } catch (error) {
      if (!(error instanceof OverviewError)) throw error;
      this.dispatch({ kind: "failed", text: error.message });
    }
  }

  private wait(): void {
    this.stopWaiting();
    if (this.model.link.kind !== "open") return;
    const left_s = this.model.behind ? 0 : this.asked_s + PACE_S - this.world.now_s();
    this.waiting = true;
    this.cancelWait = this.world.after(Math.min(PACE_S, Math.max(0, left_s)), () => this.ask());
  }

  private ask(): void {
    this.stopWaiting();
    this.asked_s = this.world.now_s();
    this.link.request("overview", question(this.model));
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
