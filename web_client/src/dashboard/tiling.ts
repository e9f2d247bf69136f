/** Where the tiles of a plan are drawn: slabs in depth side by side, rows downward. Pure. */

import type { Plan, PlanTile } from "./overview";

/** A tile's rectangle in shares of its slab's panel (0 to 1), and how much of it is back. */
export interface Rectangle {
  readonly tile: PlanTile;
  readonly slab: number;
  readonly x: number;
  readonly y: number;
  readonly width: number;
  readonly height: number;
  readonly filled: number;
}

export interface Tiling {
  readonly slabs: number;
  readonly rectangles: readonly Rectangle[];
}

/**
 * Lay a plan out. Regions of a GEMM may be cut into different numbers of slabs, so a tile's slab is
 * one more than that of the tile right before it in depth.
 */
export function layOut(plan: Plan): Tiling {
  const byDepth = [...plan.tiles].sort((a, b) => a.k0 - b.k0);
  const endingAt = new Map<number, Rectangle[]>();
  const rectangles: Rectangle[] = [];
  let slabs = plan.tiles.length > 0 ? 1 : 0;
  for (const tile of byDepth) {
    const before = endingAt.get(tile.k0)?.find((other) => overlap(other.tile, tile));
    const slab = before === undefined ? 0 : before.slab + 1;
    slabs = Math.max(slabs, slab + 1);
    const rectangle = {
      tile,
      slab,
      x: tile.n0 / plan.n,
      y: tile.m0 / plan.m,
      width: (tile.n1 - tile.n0) / plan.n,
      height: (tile.m1 - tile.m0) / plan.m,
      filled: tile.blocks > 0 ? tile.done / tile.blocks : 0,
    };
    rectangles.push(rectangle);
    const ending = endingAt.get(tile.k1);
    if (ending === undefined) endingAt.set(tile.k1, [rectangle]);
    else ending.push(rectangle);
  }
  return { slabs, rectangles };
}

/** A panel's place, in the units of the area. */
export interface Panel {
  readonly x: number;
  readonly y: number;
  readonly width: number;
  readonly height: number;
}

/** Places for the slabs' panels: side by side, in several lines once they would be too narrow. */
export function panels(slabs: number, width: number, height: number, gap: number): Panel[] {
  if (slabs === 0) return [];
  const narrowest = 96;
  const across = Math.max(1, Math.min(slabs, Math.floor((width + gap) / (narrowest + gap))));
  const down = Math.ceil(slabs / across);
  const each = {
    width: (width - gap * (across - 1)) / across,
    height: (height - gap * (down - 1)) / down,
  };
  return Array.from({ length: slabs }, (_, slab) => ({
    x: (slab % across) * (each.width + gap),
    y: Math.floor(slab / across) * (each.height + gap),
    ...each,
  }));
}

/** Blocks of the plan, and how many are back. */
export function progress(plan: Plan): { readonly blocks: number; readonly done: number } {
  let blocks = 0;
  let done = 0;
  for (const tile of plan.tiles) {
    blocks += tile.blocks;
    done += tile.done;
  }
  return { blocks, done };
}

function overlap(a: PlanTile, b: PlanTile): boolean {
  return a.m0 < b.m1 && b.m0 < a.m1 && a.n0 < b.n1 && b.n0 < a.n1;
}
