/** Records of a job, as `cleave train --json` prints them; the dashboard reads what it shows. */

/** How long a device was busy in a step by stages, in seconds. */
export interface DeviceUse {
  readonly name: string;
  readonly compute_s: number;
  readonly down_s: number;
  readonly up_s: number;
}

export interface StepRecord {
  readonly event: "step";
  readonly step: number;
  /** Not finite where training went wrong. */
  readonly loss: number;
  /** Of the same step in the run that the job is compared with; null where there is none. */
  readonly against_loss: number | null;
  readonly tokens: number;
  /** What `fleet_s` counts: `wall` or `virtual`. */
  readonly clock: string;
  readonly wall_s: number;
  readonly fleet_s: number;
  readonly ps_s: number;
  readonly downlink_bytes: number;
  readonly uplink_bytes: number;
  readonly floor_bytes: number;
  readonly reissued: number;
  /** The server's own work in a step by stages, by part. */
  readonly loss_s: number;
  readonly sums_s: number;
  readonly optimizer_s: number;
  readonly audit_s: number;
  readonly planning_s: number;
  /** The busiest devices of a step by stages; empty for other steps. */
  readonly devices: readonly DeviceUse[];
}

export interface EvalRecord {
  readonly event: "eval";
  readonly step: number;
  /** NaN where it was not finite. */
  readonly eval_loss: number;
}

/**
 * What a user should know: `fleet` says who multiplies, `disk` and `servers` that training waits for
 * these or no more, `failed` why the job ended.
 */
export interface TextRecord {
  readonly event: "note" | "fleet" | "disk" | "servers" | "failed" | "stopped";
  readonly text: string;
}

export type JobRecord = StepRecord | EvalRecord | TextRecord;

const STEP_NUMBERS = [
  "step",
  "loss",
  "tokens",
  "wall_s",
  "fleet_s",
  "ps_s",
  "downlink_bytes",
  "uplink_bytes",
  "floor_bytes",
  "reissued",
  "loss_s",
  "sums_s",
  "optimizer_s",
  "audit_s",
  "planning_s",
] as const;

/** The records that are known here, in their order; others are left out. */
export function readRecords(values: readonly unknown[]): JobRecord[] {
  const records: JobRecord[] = [];
  for (const value of values) {
    const record = readRecord(value);
    if (record !== null) records.push(record);
  }
  return records;
}

function readRecord(value: unknown): JobRecord | null {
  if (typeof value !== "object" || value === null) return null;
  const map = value as Record<string, unknown>;
  switch (map.event) {
    case "step": {
      const read = Object.fromEntries(STEP_NUMBERS.map((name) => [name, real(map[name])]));
      const clock = map.clock === "virtual" ? "virtual" : "wall";
      const against_loss = realOrNull(map.against_loss);
      const devices = readDevices(map.devices);
      return { ...read, event: "step", clock, against_loss, devices } as unknown as StepRecord;
    }
    case "eval":
      return { event: "eval", step: real(map.step), eval_loss: realOrNull(map.eval_loss) ?? NaN };
    case "sample":
      return {
        event: "note",
        text: `Sample after step ${real(map.step)}: ${String(map.text ?? "")}`,
      };
    case "note":
    case "fleet":
    case "disk":
    case "servers":
    case "failed":
    case "stopped":
      return { event: map.event, text: String(map.text ?? "") };
    default:
      return null;
  }
}

function readDevices(value: unknown): DeviceUse[] {
  if (!Array.isArray(value)) return [];
  return value.flatMap((item: unknown) => {
    if (typeof item !== "object" || item === null) return [];
    const map = item as Record<string, unknown>;
    const [compute_s, down_s, up_s] = [real(map.compute_s), real(map.down_s), real(map.up_s)];
    return [{ name: String(map.name ?? ""), compute_s, down_s, up_s }];
  });
}

/** A loss may be NaN or infinite, and stays so; a number that is not there counts nothing. */
function real(value: unknown): number {
  return realOrNull(value) ?? 0;
}

function realOrNull(value: unknown): number | null {
  if (typeof value === "bigint") return Number(value);
  return typeof value === "number" ? value : null;
}
