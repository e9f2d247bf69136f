/** What this browser keeps: a credential for each server, the owner's choices, what it gave. */

import { kept } from "../ui/storage";
import type { Counted } from "./data_use";
import type { Invitation } from "./invitation";

/** This device, as one server knows it. */
export interface SavedDevice {
  readonly server: string;
  readonly credential: string;
}

/** What a device gave to a server so far, over all visits. */
export interface Contribution {
  readonly blocks: number;
  readonly flops: number;
  /** Time in which it worked. */
  readonly seconds: number;
}

const LATEST = "cleave.latest";
const HELPING = "cleave.helping";

/** What `hello` carries: a credential, and a code in reserve. */
export interface Keys {
  readonly credential: string;
  readonly join_code: string;
}

/** Reads and writes the browser's storage, which may be full or forbidden: then nothing is kept. */
export class Saved {
  readonly #storage: Storage | null;
  readonly #tab: Storage | null;

  /**
   * @param storage `localStorage`, or null where the browser forbids it
   * @param tab `sessionStorage`, which a reload keeps, or null where the browser forbids it
   */
  constructor(storage: Storage | null, tab: Storage | null = null) {
    this.#storage = storage;
    this.#tab = tab;
  }

  /**
   * The address's fragment with which the owner has started this tab, and not stopped it: it
   * continues after a reload. Null where the owner has to be asked.
   */
  get helping(): string | null {
    return this.#tab?.getItem(HELPING) ?? null;
  }

  set helping(fragment: string | null) {
    if (fragment === null) this.#tab?.removeItem(HELPING);
    else kept(this.#tab, HELPING, fragment);
  }

  /** The device of an invitation's server; of the latest server, if the invitation names none. */
  device(invitation: Invitation): SavedDevice | null {
    const server = invitation.server || (this.#read(LATEST) as string | null) || "";
    const credential = this.#read(`cleave.credential.${server}`);
    return typeof credential === "string" ? { server, credential } : null;
  }

  /** Ours if we have one, with the invitation's code in reserve; null where there is neither. */
  keys(invitation: Invitation): Keys | null {
    const device = this.device(invitation);
    if (device) return { credential: device.credential, join_code: invitation.code };
    return invitation.code ? { credential: invitation.code, join_code: "" } : null;
  }

  /** Keep a device; returns whether it could be kept. */
  keep({ server, credential }: SavedDevice): boolean {
    return this.#write(`cleave.credential.${server}`, credential) && this.#write(LATEST, server);
  }

  /** Forget everything about a server, and the owner's choices, but not today's data use. */
  forget(server: string): void {
    this.helping = null;
    const kinds = ["credential", "contribution", "rate", "title"];
    const keys = kinds.map((kind) => `cleave.${kind}.${server}`);
    for (const key of [...keys, LATEST, "cleave.choices"]) {
      this.#storage?.removeItem(key);
    }
  }

  contribution(server: string): Contribution {
    const saved = this.#read(`cleave.contribution.${server}`) as Partial<Contribution> | null;
    const { blocks, flops, seconds } = saved ?? {};
    return {
      blocks: Number(blocks) || 0,
      flops: Number(flops) || 0,
      seconds: Number(seconds) || 0,
    };
  }

  keepContribution(server: string, contribution: Contribution): void {
    this.#write(`cleave.contribution.${server}`, contribution);
  }

  /** What it used of data a second when it helped a server last; null where that is not known. */
  lastBytesPerSecond(server: string): number | null {
    return Number(this.#read(`cleave.rate.${server}`)) || null;
  }

  keepBytesPerSecond(server: string, bytes_per_s: number): void {
    this.#write(`cleave.rate.${server}`, bytes_per_s);
  }

  /** Who asked for devices when a server last answered; "" if unknown. */
  title(server: string): string {
    const title = this.#read(`cleave.title.${server}`);
    return typeof title === "string" ? title : "";
  }

  keepTitle(server: string, title: string): void {
    this.#write(`cleave.title.${server}`, title);
  }

  /** Bytes that were used, by span. */
  dataUse(): { [span: string]: Counted } {
    const saved = this.#read("cleave.data");
    return typeof saved === "object" && saved !== null ? { ...saved } : {};
  }

  keepDataUse(counted: { readonly [span: string]: Counted }): void {
    this.#write("cleave.data", counted);
  }

  /** The owner's choices, laid over what holds without any. */
  choices<T extends object>(standard: T): T {
    const saved = this.#read("cleave.choices");
    return typeof saved === "object" && saved !== null ? { ...standard, ...saved } : standard;
  }

  keepChoices(choices: object): void {
    this.#write("cleave.choices", choices);
  }

  #read(key: string): unknown {
    const text = this.#storage?.getItem(key);
    if (text === null || text === undefined) return null;
    try {
      return JSON.parse(text);
    } catch {
      return null; // not ours, or half written: as good as nothing
    }
  }

  #write(key: string, value: unknown): boolean {
    return kept(this.#storage, key, JSON.stringify(value)); // if not, it needs a new code next time
  }
}
