/** Figures in words that only the dashboard needs; the others are in `ui/figures.ts`. */

import { count, duration, quantity } from "../ui/figures";
import type { JobRecord } from "./records";

const DASH = "–";

/** A span of time with three digits, e.g. `850 ms`, `2.41 s`, `3 min 20 s`. */
export function seconds(value: number | null): string {
  if (value === null || !Number.isFinite(value)) return DASH;
  if (value >= 99.5) return duration(value);
  if (value >= 9.995) return `${value.toFixed(1)} s`;
  if (value >= 0.9995) return `${value.toFixed(2)} s`;
  return value === 0 ? "0 s" : `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
}

/** Over what a rate is taken, e.g. `mean of 10.0 s`. */
export function meanOf(window_s: number | null): string {
  return `mean of ${seconds(window_s)}`;
}

/** A share, e.g. `93 %`. */
export function percent(value: number | null): string {
  if (value === null || !Number.isFinite(value)) return DASH;
  return `${(value * 100).toFixed(value < 0.00995 && value >= 0.0005 ? 1 : 0)}\u202f%`;
}

/** A loss with four digits after the point, or what it is instead of a number. */
export function loss(value: number): string {
  if (Number.isFinite(value)) return value.toFixed(4);
  return Number.isNaN(value) ? "not a number" : "infinite";
}

/** A relative difference with two digits, e.g. `1.2e-6`, `0.034`. */
export function difference(value: number): string {
  if (!Number.isFinite(value)) return loss(value);
  if (value === 0) return "0";
  return value < 0.00995 ? value.toExponential(1) : String(Number(value.toPrecision(2)));
}

/** Energy, in watt hours from a kilojoule on. */
export function energy(joules: number | null): string {
  if (joules === null) return DASH;
  return joules < 1000 ? quantity(joules, "J") : quantity(joules / 3600, "Wh");
}

/** Energy of a device, and that it measured it itself where it did. */
export function energyOf(device: {
  readonly energy_j: number | null;
  readonly energy_basis: string;
}): string {
  const words = energy(device.energy_j);
  return device.energy_basis === "measured" ? `${words}, measured` : words;
}

/** Carbon dioxide equivalent, from milligrams to tonnes. */
export function carbon(gco2e: number | null): string {
  if (gco2e === null) return DASH;
  return gco2e < 1 && gco2e > 0 ? `${(gco2e * 1000).toPrecision(3)} mg` : quantity(gco2e, "g");
}

/** A record of a job as a line of its log. */
export function logLine(record: JobRecord): string {
  if (record.event === "step")
    return `step ${record.step}: loss ${loss(record.loss)}, ${seconds(record.wall_s)}`;
  if (record.event === "eval")
    return `step ${record.step}: held-out loss ${loss(record.eval_loss)}`;
  return record.event === "note" ? record.text : `${record.event}: ${record.text}`;
}

/** The time of day, e.g. `14:02:11`. */
export function timeOfDay(unix_s: number): string {
  const date = new Date(unix_s * 1000);
  const two = (part: number) => String(part).padStart(2, "0");
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/** A count with its noun, e.g. `1 device`, `12 devices`. */
export function counted(number: number, one: string, many = `${one}s`): string {
  return `${count(number)} ${number === 1 ? one : many}`;
}

/** How many devices each of several servers has, and which of them do not answer. */
export function serverLoads(counts: readonly (number | null)[]): string {
  const known = counts.filter((count) => count !== null).join(" + ");
  const lost = counts.flatMap((count, at) => (count === null ? [`server ${at + 1}`] : []));
  const silent = lost.length > 0 ? `; no answer from ${lost.join(", ")}` : "";
  return `${counts.length} servers with ${known} devices${silent}`;
}
