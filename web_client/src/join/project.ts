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

/** The training that devices help with. */
export interface Training {
  /** Of the job that runs, or ran last; "" where there is none. */
  readonly state: string;
  /** Devices that are connected now; null where that is not known. */
  readonly devices: number | null;
  /** What one of them moves of data a second: 0 without work for them; null where unknown. */
  readonly bytes_per_device_s: number | null;
}

/** The answer of `/project.json`. */
export interface Project {
  /** Who asks for devices; "" where nobody says. */
  readonly title: string;
  /** What the devices help to train; "" where nobody says. */
  readonly about: string;
  readonly training: Training;
  readonly key: Key;
  /** Hours since 1970, and the FLOPs of all devices in that hour. */
  readonly hours: readonly (readonly [number, number])[];
}

const HOUR_MS = 3_600_000;

/** How long an answer may take before the page is shown without it. */
const PATIENCE_MS = 4000;

/** Read an answer. A part that is not as expected counts as missing. */
export function readProject(answer: unknown): Project {
  const { title, about, training, key, flops_by_hour } = fields(answer);
  const { state, devices, bytes_per_device_s } = fields(training);
  const hours = Array.isArray(flops_by_hour) ? flops_by_hour.filter(isHour) : [];
  return {
    title: text(title),
    about: text(about),
    training: {
      state: text(state),
      devices: finite(devices),
      bytes_per_device_s: finite(bytes_per_device_s),
    },
    key: Object.values(Key).find((each) => each === key) ?? Key.UNTOLD,
    hours,
  };
}

/** Before the server has answered. */
export const UNKNOWN: Project = readProject(null);

/** Whether a training runs and gives its devices no work: its server computes alone. */
export function runsAlone({ training }: Project): boolean {
  return training.state === "running" && training.bytes_per_device_s === 0;
}

/** Whether a key admits nobody. */
export function isDead(key: Key): boolean {
  return key !== Key.OPEN && key !== Key.KNOWN && key !== Key.UNTOLD;
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
 * @param flops of this device, since midnight
 * @param helps whether it has work now
 */
export function shareOfToday(
  flops: number,
  { hours, training }: Project,
  now: Date,
  helps: boolean,
): string {
  const midnight = new Date(now.getFullYear(), now.getMonth(), now.getDate()).getTime();
  const today = hours.filter(([hour]) => hour * HOUR_MS >= midnight);
  const all = today.reduce((sum, [, each]) => sum + each, 0);
  if (all <= 0 || flops <= 0) return "";
  const percent = Math.round(Math.min(100, (100 * flops) / all)); // the server's counts may be older
  if (percent < 1) return "You did less than 1 % of today's training.";
  if (percent < 100) return `You did ${percent} % of today's training.`;
  return helps && training.devices === 1
    ? "You are the only helper right now."
    : "You did all of today's training.";
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
