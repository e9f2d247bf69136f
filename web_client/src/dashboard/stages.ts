/** A step by stages: which device holds which layers, and how far each stage is. Pure. */

import { asMap, list, number, truth } from "./reading";

/** A device that holds the layers of a stage; all but `device` count micro-batches. */
export interface Holder {
  readonly device: number;
  /** Asked for and not answered, by pass. */
  readonly forward: number;
  readonly backward: number;
  /** Whose gradients are in sums on the device, and in sums that it was asked for. */
  readonly summed: number;
  readonly coming: number;
}

/** Consecutive layers, and how many micro-batches have passed them. */
export interface Stage {
  /** Counted from 0; `stop` is not among them. */
  readonly first: number;
  readonly stop: number;
  readonly loss: boolean;
  /** Which slice of the loss it is, and of how many, where it has no layers. */
  readonly slice: readonly [number: number, of: number] | null;
  readonly forward: number;
  readonly backward: number;
  /** Whose gradients are in sums that the PS has. */
  readonly landed: number;
  /** How many devices hold the layers; `holders` has as many as the reply had room for. */
  readonly devices: number;
  readonly holders: readonly Holder[];
}

export interface StageStep {
  readonly batches: number;
  readonly ended: boolean;
  readonly repeated: number;
  /** With state on devices, the number of steps since the snapshot; null without. */
  readonly logged: number | null;
  readonly stages: readonly Stage[];
}

/** Read that part of an overview; null where no step goes by stages. */
export function readStages(value: unknown): StageStep | null {
  const step = asMap(value);
  if (step === null) return null;
  return {
    batches: number(step.batches) ?? 0,
    ended: truth(step.ended),
    repeated: number(step.repeated) ?? 0,
    logged: number(step.logged),
    stages: list(step.stages).map(readStage),
  };
}

function readStage(value: unknown): Stage {
  const stage = asMap(value) ?? {};
  const holders = list(stage.holders).map(readHolder);
  return {
    first: number(stage.first) ?? 0,
    stop: number(stage.stop) ?? 0,
    loss: truth(stage.loss),
    slice: readSlice(stage.slice),
    forward: number(stage.forward) ?? 0,
    backward: number(stage.backward) ?? 0,
    landed: number(stage.landed) ?? 0,
    devices: number(stage.devices) ?? holders.length,
    holders,
  };
}

function readSlice(value: unknown): readonly [number, number] | null {
  const [part, of] = list(value).map(number);
  return part == null || of == null ? null : [part, of];
}

function readHolder(value: unknown): Holder {
  const at = list(value);
  const field = (index: number): number => number(at[index]) ?? 0;
  return {
    device: field(0),
    forward: field(1),
    backward: field(2),
    summed: field(3),
    coming: field(4),
  };
}

/** The layers of a stage for people, who count from 1, e.g. `layers 5 to 8 and the loss`. */
export function layersOf(stage: Stage): string {
  if (stage.slice !== null) return `slice ${stage.slice[0] + 1} of ${stage.slice[1]} of the loss`;
  if (stage.first === stage.stop) return "the loss";
  const first = stage.first + 1;
  const layers = first >= stage.stop ? `layer ${first}` : `layers ${first} to ${stage.stop}`;
  return stage.loss ? `${layers} and the loss` : layers;
}

/** What a device does for a stage now, e.g. `2 forward, 1 backward; 3 summed`. */
export function doing(holder: Holder): string {
  const asked = [
    ...(holder.forward > 0 ? [`${holder.forward} forward`] : []),
    ...(holder.backward > 0 ? [`${holder.backward} backward`] : []),
  ].join(", ");
  const sums = holder.coming > 0 ? "sends its sums" : `${holder.summed} summed`;
  return `${asked === "" ? "nothing in flight" : asked}; ${sums}`;
}

/** How much of a step is done, 0 to 1: two passes and the sums of each stage count alike. */
export function progressOf(step: StageStep): number {
  let done = 0;
  for (const stage of step.stages) done += stage.forward + stage.backward + stage.landed;
  const all = 3 * step.batches * step.stages.length;
  return all === 0 ? 0 : done / all;
}

/** Micro-batches that devices were asked for and have not answered. */
export function inFlight(step: StageStep): number {
  const holders = step.stages.flatMap((stage) => stage.holders);
  return holders.reduce((sum, holder) => sum + holder.forward + holder.backward, 0);
}
