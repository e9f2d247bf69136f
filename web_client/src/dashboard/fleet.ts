/** The fleet as a table: which devices, in which order; and how many of each kind. Pure. */

import type { Crowd, Device } from "./overview";

/** A column that can be sorted by. */
export type SortKey = Exclude<keyof Device, "identity" | "reason" | "compute_s" | "own">;

export interface Order {
  readonly key: SortKey;
  readonly descending: boolean;
}

/** What is shown; an empty text shows all. */
export interface Filter {
  /** Part of name, identity, number, kind, state or reason; or `own`. */
  readonly text: string;
  readonly kind: string;
  readonly state: string;
}

export const NO_FILTER: Filter = { text: "", kind: "", state: "" };

/** The devices that pass, in order. What is not known comes last, either way. */
export function arrange(devices: readonly Device[], filter: Filter, order: Order): Device[] {
  const wanted = filter.text.trim().toLowerCase();
  const passing = devices.filter(
    (device) =>
      (filter.kind === "" || kindOf(device) === filter.kind) &&
      (filter.state === "" || device.state === filter.state) &&
      (wanted === "" || words(device).includes(wanted)),
  );
  const sign = order.descending ? -1 : 1;
  return passing.sort((a, b) => compare(a[order.key], b[order.key], sign) || a.device - b.device);
}

/** How many devices of each kind are in each state. */
export interface Census {
  readonly kinds: readonly string[];
  readonly states: readonly string[];
  /** By kind, then state. */
  readonly counts: ReadonlyMap<string, ReadonlyMap<string, number>>;
}

/** Count a fleet; kinds by size, states in the order of a device's life. */
export function census(crowds: readonly Crowd[]): Census {
  const counts = new Map<string, Map<string, number>>();
  const sizes = new Map<string, number>();
  const states = new Set<string>();
  for (const crowd of crowds) {
    const kind = kindOf(crowd);
    const row = counts.get(kind) ?? new Map<string, number>();
    counts.set(kind, row);
    row.set(crowd.state, (row.get(crowd.state) ?? 0) + crowd.count);
    sizes.set(kind, (sizes.get(kind) ?? 0) + crowd.count);
    states.add(crowd.state);
  }
  return {
    kinds: [...sizes.keys()].sort(
      (a, b) => (sizes.get(b) ?? 0) - (sizes.get(a) ?? 0) || a.localeCompare(b),
    ),
    states: [...states].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b)),
    counts,
  };
}

/** What a device is called. */
export function nameOf(device: Device): string {
  return device.name || device.identity || `device ${device.device}`;
}

/** The kind of a device, "unknown" where nothing says. */
export function kindOf({ kind }: { readonly kind: string }): string {
  return kind || "unknown";
}

/** A share of what was stated, as 0.93; null where either is not known. */
export function share(now: number | null, stated: number | null): number | null {
  return now === null || stated === null || stated <= 0 ? null : now / stated;
}

/** Whether a state is one that needs an operator's eye, waits, or is as it should be. */
export function concern(state: string): "good" | "warning" | "bad" | "soft" {
  switch (state) {
    case "ready":
    case "busy":
      return "good";
    case "overdue":
    case "set aside":
      return "warning";
    case "quarantined":
    case "lost":
      return "bad";
    default:
      return "soft";
  }
}

const LIFE = [
  "joining",
  "probing",
  "ready",
  "busy",
  "overdue",
  "set aside",
  "draining",
  "quarantined",
  "lost",
];

function rank(state: string): number {
  const place = LIFE.indexOf(state);
  return place < 0 ? LIFE.length : place;
}

function words(device: Device): string {
  const { name, identity, kind, state, reason, own } = device;
  const words = `${device.device} ${name} ${identity} ${kind} ${state} ${reason}`;
  return (own ? `${words} own` : words).toLowerCase();
}

function compare(a: string | number | null, b: string | number | null, sign: number): number {
  const unknownA = a === null || a === "";
  const unknownB = b === null || b === "";
  if (unknownA || unknownB) return Number(unknownA) - Number(unknownB);
  if (typeof a === "number" && typeof b === "number") return sign * (a - b);
  // Not localeCompare: it costs a hundred times as much, and there are thousands of names.
  const left = String(a);
  const right = String(b);
  return sign * (left < right ? -1 : left > right ? 1 : 0);
}
