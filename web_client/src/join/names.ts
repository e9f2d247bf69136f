/** What a device is called until its owner says otherwise, and what it can offer. */

const SYSTEMS: readonly (readonly [RegExp, string])[] = [
  [/iPhone|iPod/, "iPhone"],
  [/iPad/, "iPad"],
  [/Android.*Mobile/, "Android phone"],
  [/Android/, "Android tablet"],
  [/Windows/, "Windows computer"],
  [/CrOS/, "Chromebook"],
  [/Mac OS X|Macintosh/, "Mac"],
  [/Linux/, "Linux computer"],
];

/** A name from the browser's own words, e.g. `Android phone`. */
export function deviceName(userAgent: string): string {
  return SYSTEMS.find(([words]) => words.test(userAgent))?.[1] ?? "Computer";
}

/** How the page calls what it runs on. */
export type Thing = "phone" | "tablet" | "computer";

/** The most that the server's tests of a connection move, in megabytes. */
export function testMegabytes(thing: Thing): number {
  return thing === "computer" ? 45 : 15;
}

/** A name as a person typed it, or else the browser's own word. */
export function chosenName(typed: string, userAgent: string): string {
  return typed.trim() || deviceName(userAgent);
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

/** What only some browsers tell. */
interface Extras {
  readonly deviceMemory?: number;
}

/** What the PS may fill of this browser's memory, in bytes. */
export function deviceMemoryBytes(): number {
  const { deviceMemory } = navigator as Extras;
  return memoryBytes(deviceMemory, globalThis.crossOriginIsolated === true);
}

/** More threads than this gain little, and make a phone hot. */
const MOST_THREADS = 8;

/** Threads that multiply here: one core is left to everything else. */
export function threadsOf(cores: number): number {
  return Math.max(1, Math.min(MOST_THREADS, cores - 1));
}
