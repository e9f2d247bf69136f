/** What the server tells the device's owner about the project, and the device's share of its work. */

/** The answer of `/project.json`. */
export interface Project {
  /** Who asks for devices; "" where nobody says. */
  readonly title: string;
  /** What the devices help to train; "" where nobody says. */
  readonly about: string;
  /** Hours since 1970, and the FLOPs of all devices in that hour. */
  readonly hours: readonly (readonly [number, number])[];
}

/** Before the server has answered. */
export const UNKNOWN: Project = { title: "", about: "", hours: [] };

const HOUR_MS = 3_600_000;

/** Read an answer. A part that is not as expected counts as missing. */
export function readProject(answer: unknown): Project {
  const { title, about, flops_by_hour } = (answer ?? {}) as { readonly [name: string]: unknown };
  const hours = Array.isArray(flops_by_hour) ? flops_by_hour.filter(isHour) : [];
  return { title: text(title), about: text(about), hours };
}

/** Ask the server of this page; null if it does not answer. */
export async function askProject(): Promise<Project | null> {
  try {
    const answer = await fetch("project.json", { cache: "no-store" });
    return answer.ok ? readProject(await answer.json()) : null;
  } catch {
    return null; // the connection is lost, which the device reports
  }
}

/**
 * This device's share of what all devices computed since midnight, for people; "" if unknown.
 *
 * @param flops of this device, since midnight
 */
export function shareOfToday(flops: number, { hours }: Project, now: Date): string {
  const midnight = new Date(now.getFullYear(), now.getMonth(), now.getDate()).getTime();
  const today = hours.filter(([hour]) => hour * HOUR_MS >= midnight);
  const all = today.reduce((sum, [, each]) => sum + each, 0);
  if (all <= 0 || flops <= 0) return "";
  const percent = Math.min(100, (100 * flops) / all); // the server's counts may be older
  if (percent < 1) return "less than 1 %";
  return `${Math.round(percent)} %`;
}

function text(value: unknown): string {
  return typeof value === "string" ? value : "";
}

function isHour(value: unknown): value is [number, number] {
  return Array.isArray(value) && value.length === 2 && value.every(Number.isFinite);
}
