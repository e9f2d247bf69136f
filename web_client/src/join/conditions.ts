/** When the owner lets this device work, and why it does not at the moment. */

/** The owner's choices: when to stop. */
export interface Conditions {
  readonly lowBattery: boolean;
  readonly unplugged: boolean;
  readonly hidden: boolean;
  readonly metered: boolean;
}

/** What holds until the owner chooses. */
export const STANDARD: Conditions = {
  lowBattery: true,
  unplugged: false,
  hidden: false,
  metered: true,
};

/** What a low battery is, while it is not charging. */
export const LOW_BATTERY = 0.2;

/** The device as the browser tells; null where it does not. */
export interface Surroundings {
  readonly battery: { readonly level: number; readonly charging: boolean } | null;
  readonly metered: boolean | null;
  readonly hidden: boolean;
}

/** The choices that this browser can tell the state of. */
export function offered(around: Surroundings): (keyof Conditions)[] {
  const battery: (keyof Conditions)[] = around.battery ? ["lowBattery", "unplugged"] : [];
  const metered: (keyof Conditions)[] = around.metered === null ? [] : ["metered"];
  return [...battery, "hidden", ...metered];
}

/** Why it may not work now, for people; null if it may. */
export function mayNotWork(conditions: Conditions, around: Surroundings): string | null {
  const { battery } = around;
  if (conditions.unplugged && battery && !battery.charging) return "It is not plugged in.";
  if (conditions.lowBattery && battery && !battery.charging && battery.level < LOW_BATTERY) {
    return `The battery is low (${Math.round(100 * battery.level)} %).`;
  }
  if (conditions.metered && around.metered) return "The network is metered.";
  if (conditions.hidden && around.hidden) return "This page is not in front.";
  return null;
}
