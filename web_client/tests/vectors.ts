/** The shared test vectors of `tests/vectors/` at the repository's root, as their README says. */

import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";

type Hex = string | { hex: string; times: number } | Hex[];

/** The features whose vectors this client passes. */
const FEATURES = ["measure", "graphs", "coding", "keeps"];

/** The vectors of one file that are for this client, with integers beyond 2^53 as bigints. */
export function vectors<T>(file: string): T[] {
  return all<T>(file).filter((vector) => !ofOthers(vector));
}

function ofOthers({ feature }: { feature?: string }): boolean {
  return feature !== undefined && !FEATURES.includes(feature);
}

function all<T>(file: string): (T & { feature?: string })[] {
  const path = fileURLToPath(new URL(`../../tests/vectors/${file}`, import.meta.url));
  const document = JSON.parse(readFileSync(path, "utf8"), (_, value) =>
    value !== null && typeof value === "object" && "$int" in value ? BigInt(value.$int) : value,
  );
  return document.vectors;
}

/** Bytes as the vectors write them. */
export function bytesOf(hex: Hex): Uint8Array {
  return Uint8Array.from(Buffer.from(flat(hex), "hex"));
}

function flat(hex: Hex): string {
  if (typeof hex === "string") return hex;
  return Array.isArray(hex) ? hex.map(flat).join("") : hex.hex.repeat(hex.times);
}

export type { Hex };

/** Values in one form, whatever mix of numbers and bigints they came as. */
export function same(value: unknown): unknown {
  if (typeof value === "bigint") return value.toString();
  if (typeof value === "number") return value.toString();
  if (Array.isArray(value)) return value.map(same);
  if (value !== null && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, same(item)]));
  }
  return value;
}
