/** What crossed the network, by what it was for. Pure. */

import { asMap, number } from "./reading";

/** Kinds, in the order in which they are shown. */
const KINDS = ["weights", "activations", "gradients", "graphs", "tiles", "other"];

export interface KindOfTraffic {
  readonly kind: string;
  readonly down_bytes: number;
  readonly up_bytes: number;
}

export type Traffic = readonly KindOfTraffic[];

/** Read that part of an overview: the kinds of which something travelled; new ones come last. */
export function readTraffic(value: unknown): Traffic {
  const down = asMap(asMap(value)?.down) ?? {};
  const up = asMap(asMap(value)?.up) ?? {};
  const names = [...new Set([...KINDS, ...Object.keys(down), ...Object.keys(up)])];
  return names
    .map((kind) => ({
      kind,
      down_bytes: number(down[kind]) ?? 0,
      up_bytes: number(up[kind]) ?? 0,
    }))
    .filter(({ down_bytes, up_bytes }) => down_bytes > 0 || up_bytes > 0);
}
