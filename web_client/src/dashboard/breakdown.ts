/** Where the time of a step by stages went, as its record says. Pure. */

import type { DeviceUse, StepRecord } from "./records";
import { seconds } from "./text";

/** Smallest share of a step for which a part is called its bottleneck. */
const BOTTLENECK_SHARE = 0.6;

const OF_DEVICE = [
  ["compute_s", "computation"],
  ["down_s", "downlink"],
  ["up_s", "uplink"],
] as const;

/** The server's own work in a step, longest first; parts of no length are left out. */
export function serverParts(record: StepRecord): readonly (readonly [string, number])[] {
  const parts: [string, number][] = [
    ["the loss", record.loss_s],
    ["adding gradients", record.sums_s],
    ["the optimizer", record.optimizer_s],
    ["audits", record.audit_s],
    ["planning", record.planning_s],
  ];
  const known_s = parts.reduce((sum, [, part_s]) => sum + part_s, 0);
  parts.push(["other work", Math.max(0, record.ps_s - known_s)]);
  return parts.filter(([, part_s]) => part_s >= 0.01).sort((a, b) => b[1] - a[1]);
}

/** What takes most of a step by stages, in a sentence; empty for other steps. */
export function bottleneck(record: StepRecord): string {
  const first = record.devices[0];
  if (first === undefined) return "";
  const virtual = record.clock === "virtual";
  const step_s = virtual ? record.fleet_s : record.wall_s;
  // On a virtual clock, the server's own work takes no time.
  let [what, most_s] = ["the server's own work", virtual ? -1 : record.ps_s];
  for (const [key, name] of OF_DEVICE) {
    const busiest = record.devices.reduce(
      (one: DeviceUse, other) => (other[key] > one[key] ? other : one),
      first,
    );
    if (busiest[key] > most_s) [what, most_s] = [`the ${name} of ${busiest.name}`, busiest[key]];
  }
  const span = `${seconds(most_s)} of ${seconds(step_s)}${virtual ? " (simulated)" : ""}`;
  if (most_s >= BOTTLENECK_SHARE * step_s) return `Bottleneck: ${what} takes ${span}.`;
  return (
    `No part takes most of the step, and the longest is ${what} with ${span}; larger batches ` +
    "leave less time in which devices wait."
  );
}
