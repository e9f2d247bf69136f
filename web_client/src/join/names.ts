/** What a device is called until its owner says otherwise, and what it can offer. */

const BROWSERS: readonly (readonly [RegExp, string])[] = [
  [/Edg\//, "Edge"],
  [/OPR\//, "Opera"],
  [/SamsungBrowser\//, "Samsung Internet"],
  [/Firefox\/|FxiOS\//, "Firefox"],
  [/Chrome\/|CriOS\//, "Chrome"],
  [/Safari\//, "Safari"],
];

const SYSTEMS: readonly (readonly [RegExp, string])[] = [
  [/Android/, "Android"],
  [/iPhone/, "iPhone"],
  [/iPad/, "iPad"],
  [/Windows/, "Windows"],
  [/CrOS/, "ChromeOS"],
  [/Mac OS X|Macintosh/, "Mac"],
  [/Linux/, "Linux"],
];

/** A name from the browser's own words, e.g. `Chrome on Android`. */
export function deviceName(userAgent: string): string {
  const find = (table: typeof BROWSERS) => table.find(([words]) => words.test(userAgent))?.[1];
  return `${find(BROWSERS) ?? "Browser"} on ${find(SYSTEMS) ?? "a device"}`;
}

const MIB = 2 ** 20;

/**
 * What the PS may fill, in bytes: a sixteenth of the machine, since pages get a share only, and
 * copies are made. Threads without shared memory each hold what they need, so they get less.
 *
 * @param device_gib what the browser says the machine has; undefined where it does not tell
 */
export function memoryBytes(device_gib: number | undefined, isolated: boolean): number {
  const share = device_gib === undefined ? 128 * MIB : (device_gib * 1024 * MIB) / 16;
  const bytes = Math.max(64 * MIB, Math.min(512 * MIB, share));
  return isolated ? bytes : bytes / 2;
}

/** More threads than this gain little, and make a phone hot. */
const MOST_THREADS = 8;

/** Threads that multiply here: one core is left to everything else. */
export function threadsOf(cores: number): number {
  return Math.max(1, Math.min(MOST_THREADS, cores - 1));
}
