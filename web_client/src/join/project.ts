/** What the server tells the device's owner about the project, and the device's share of its work. */

/** What a key of this browser is worth, in the server's words; "" where it does not tell. */
export enum Key {
  OPEN = "open",
  KNOWN = "known",
  EXPIRED = "expired",
  USED_UP = "used up",
  VOID = "void",
  UNKNOWN = "unknown",
  REVOKED = "revoked",
  QUARANTINED = "quarantined",
  UNTOLD = "",
}

/** The kinds of work that a training gives, in the server's words. */
export enum Work {
  /** Products of matrices, for all devices. */
  TILES = "tiles",
  /** Whole layers, for devices that may and can. */
  LAYERS = "layers",
}

/** What a device can expect from the training that runs. */
export enum Outlook {
  /** Work, as far as is known. */
  WORK = "work",
  /** The server trains alone at the moment, and may find a use for devices at any time. */
  ALONE = "alone",
  /** Other devices work, and may not need this one. */
  NONE = "none",
  /** The training has no work for this device, whether it is connected or not. */
  NEVER = "never",
}

/** Which devices get work if this one gets none. */
export enum Others {
  NOBODY = "nobody",
  /** Devices of the server's owner. */
  OWN = "own",
  /** Devices that can compute what this browser cannot. */
  ABLE = "able",
}

/** The training that devices help with. */
export interface Training {
  /** Of the job that runs, or ran last; "" where there is none. */
  readonly state: string;
  /** Devices that are connected now; null where that is not known. */
  readonly devices: number | null;
  /** What one of them moves of data a second: 0 without work for them; null where unknown. */
  readonly bytes_per_device_s: number | null;
  /** The data that a device moved when devices last had work; null if unknown. */
  readonly usual_bytes_per_device_s: number | null;
  /** The kinds of work that it gives; null if unknown. */
  readonly work: readonly Work[] | null;
  /** Whether its settings exclude other kinds of work. */
  readonly settled: boolean;
  /** Whether all devices may train layers, and not only those of the server's owner. */
  readonly layers_on_any: boolean;
}

/** The answer of `/project.json`. */
export interface Project {
  /** Who asks for devices; "" where nobody says. */
  readonly title: string;
  /** What the devices help to train; "" where nobody says. */
  readonly about: string;
  readonly training: Training;
  readonly key: Key;
  /** Whether the device is one of those of the server's owner. */
  readonly own: boolean;
  /** Why the key was withdrawn; "" if unknown. */
  readonly reason: string;
  /** Hours since 1970, and the FLOPs of all devices in that hour. */
  readonly hours: readonly (readonly [number, number])[];
}

const HOUR_MS = 3_600_000;

const WORKS = Object.values(Work);

/** How long an answer may take before the page is shown without it. */
const PATIENCE_MS = 4000;

/** Read an answer. A part that is not as expected counts as missing. */
export function readProject(answer: unknown): Project {
  const { title, about, training, key, own, reason, flops_by_hour } = fields(answer);
  const { state, devices, bytes_per_device_s, usual_bytes_per_device_s } = fields(training);
  const { work, settled, layers_on } = fields(training);
  const hours = Array.isArray(flops_by_hour) ? flops_by_hour.filter(isHour) : [];
  return {
    title: text(title),
    about: text(about),
    training: {
      state: text(state),
      devices: finite(devices),
      bytes_per_device_s: finite(bytes_per_device_s),
      usual_bytes_per_device_s: finite(usual_bytes_per_device_s),
      work: Array.isArray(work) ? WORKS.filter((each) => work.includes(each)) : null,
      settled: settled === true,
      layers_on_any: layers_on === "any",
    },
    key: Object.values(Key).find((each) => each === key) ?? Key.UNTOLD,
    own: own === true,
    reason: text(reason),
    hours,
  };
}

/** Before the server has answered. */
export const UNKNOWN: Project = readProject(null);

/** Whether this device may train whole layers. */
export function mayTrainLayers({ own, training }: Project): boolean {
  return own || training.layers_on_any;
}

/**
 * What this device may expect.
 *
 * @param runsGraphs whether this browser can compute whole layers
 */
export function outlook(project: Project, runsGraphs: boolean): Outlook {
  const { state, work, settled, bytes_per_device_s } = project.training;
  if (state !== "running") return Outlook.WORK;
  const alone = bytes_per_device_s === 0 ? Outlook.ALONE : Outlook.WORK;
  if (work === null || work.includes(Work.TILES)) return alone;
  if (work.includes(Work.LAYERS) && runsGraphs && mayTrainLayers(project)) return alone;
  if (settled) return Outlook.NEVER;
  return work.length === 0 ? Outlook.ALONE : Outlook.NONE;
}

/** Whether a key admits nobody. */
export function isDead(key: Key): boolean {
  return key !== Key.OPEN && key !== Key.KNOWN && key !== Key.UNTOLD;
}

/** The devices that get the work instead of this one. */
export function otherHelpers(project: Project): Others {
  if (project.training.work?.length === 0) return Others.NOBODY;
  return mayTrainLayers(project) ? Others.ABLE : Others.OWN;
}

/**
 * Ask the server of this page; null if it does not answer.
 *
 * @param keys what this browser would join with; it is told of the first one that admits it, or
 *   else of the first one
 */
export async function askProject(keys: readonly string[]): Promise<Project | null> {
  let first: Project | null = null;
  for (const key of keys.length > 0 ? keys : [""]) {
    const told = await ask(key);
    if (told === null || !isDead(told.key)) return told;
    first ??= told;
  }
  return first;
}

async function ask(key: string): Promise<Project | null> {
  // A header takes no other characters, and no key has any.
  const sent = /^[\x20-\x7e]*$/.test(key) ? key : "?";
  const headers: HeadersInit = sent ? { Authorization: `Bearer ${sent}` } : {};
  try {
    const signal = AbortSignal.timeout(PATIENCE_MS);
    const answer = await fetch("project.json", { cache: "no-store", headers, signal });
    return answer.ok ? readProject(await answer.json()) : null;
  } catch {
    return null; // the connection is lost, which the device reports
  }
}

/**
 * This device's share of what all devices computed since midnight, for people; "" if unknown.
 *
 * @param flops of this device, since midnight, when the server was asked
 */
export function shareOfToday(flops: number, { hours }: Project, now: Date): string {
  const midnight = new Date(now.getFullYear(), now.getMonth(), now.getDate()).getTime();
  const today = hours.filter(([hour]) => hour * HOUR_MS >= midnight);
  const all = today.reduce((sum, [, each]) => sum + each, 0);
  if (all <= 0 || flops <= 0) return "";
  const percent = Math.round((100 * flops) / all);
  if (percent < 1) return "You did less than 1\u00a0% of today's training.";
  if (percent < 100) return `You did ${percent}\u00a0% of today's training.`;
  return "You did nearly all of today's training."; // both counts may be a second old
}

function fields(value: unknown): { readonly [name: string]: unknown } {
  return (value ?? {}) as { readonly [name: string]: unknown };
}

function text(value: unknown): string {
  return typeof value === "string" ? value : "";
}

function finite(value: unknown): number | null {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}

function isHour(value: unknown): value is [number, number] {
  return Array.isArray(value) && value.length === 2 && value.every(Number.isFinite);
}
