/** When the owner lets this device work, and why it does not at the moment. */

import { type DataCap, overCap } from "./data_use";

/** What the owner switches on and off. */
export interface Switches {
  readonly lowBattery: boolean;
  readonly unplugged: boolean;
  readonly hot: boolean;
  readonly hidden: boolean;
  readonly metered: boolean;
}

/** The owner's choices: when to stop. */
export interface Conditions extends Switches {
  readonly cap: DataCap | null;
}

/** What holds until the owner chooses. */
export const STANDARD: Conditions = {
  lowBattery: true,
  unplugged: false,
  hot: true,
  hidden: false,
  metered: true,
  cap: null,
};

/** What a low battery is, while it is not charging. */
export const LOW_BATTERY = 0.2;

/** The device as the browser tells; null where it does not. */
export interface Surroundings {
  readonly battery: { readonly level: number; readonly charging: boolean } | null;
  readonly metered: boolean | null;
  readonly hidden: boolean;
  readonly hot: boolean | null;
}

/** The switches that this browser can tell the state of. */
export function offered(around: Surroundings): (keyof Switches)[] {
  const battery: (keyof Switches)[] = around.battery ? ["lowBattery", "unplugged"] : [];
  const hot: (keyof Switches)[] = around.hot === null ? [] : ["hot"];
  const metered: (keyof Switches)[] = around.metered === null ? [] : ["metered"];
  return [...battery, ...hot, "hidden", ...metered];
}

/**
 * Why it may not work now, for people; null if it may.
 *
 * @param used bytes that were used of the limit's span; anything where there is no limit
 */
export function mayNotWork(
  conditions: Conditions,
  around: Surroundings,
  used: number,
): string | null {
  const { battery } = around;
  if (conditions.unplugged && battery && !battery.charging) return "It is not plugged in.";
  if (conditions.lowBattery && battery && !battery.charging && battery.level < LOW_BATTERY) {
    return `The battery is low (${Math.round(100 * battery.level)} %).`;
  }
  if (conditions.hot && around.hot) return "The device is hot.";
  if (conditions.metered && around.metered) return "The network is metered.";
  if (conditions.hidden && around.hidden) return "This page is not in front.";
  return overCap(conditions.cap, used);
}
