/** When the owner lets this device work, and why it does not at the moment. */

import { type DataCap, overCap, STANDARD_CAP } from "./data_use";

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

/**
 * What holds until the owner chooses.
 *
 * @param mobile whether it is a phone or a tablet: these stop pages that nobody sees anyway
 */
export function standard(mobile: boolean): Conditions {
  return {
    lowBattery: true,
    unplugged: false,
    hot: true,
    hidden: mobile,
    metered: true,
    cap: STANDARD_CAP,
  };
}

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
 * Why it may not work now and when it may again, for people; null if it may.
 *
 * @param used bytes that were used of the limit's span; anything where there is no limit
 * @param now the local time
 */
export function mayNotWork(
  conditions: Conditions,
  around: Surroundings,
  used: number,
  now: Date,
): string | null {
  const { battery } = around;
  if (conditions.unplugged && battery && !battery.charging) {
    return "It is not charging. Helping continues while it charges.";
  }
  if (conditions.lowBattery && battery && !battery.charging && battery.level < LOW_BATTERY) {
    // A level just below the limit is not shown as the limit.
    const [level, low] = [battery.level, LOW_BATTERY].map((part) => Math.floor(100 * part + 1e-6));
    return `The battery is low (${level}\u00a0%). Helping continues at ${low}\u00a0%, or while it charges.`;
  }
  if (conditions.hot && around.hot) {
    return "It is hot. Helping continues when it has cooled down.";
  }
  if (conditions.metered && around.metered) {
    return "This is mobile data or a metered network. Helping continues on Wi-Fi.";
  }
  if (conditions.hidden && around.hidden) {
    return "This page is not in front. Helping continues when you open it again.";
  }
  return overCap(conditions.cap, used, now);
}
