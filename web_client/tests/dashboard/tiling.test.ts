import { expect, test } from "vitest";
import type { Plan, PlanTile } from "../../src/dashboard/overview";
import { layOut, panels, progress } from "../../src/dashboard/tiling";
import { tileAt } from "../../src/dashboard/views/drawTiling";

function tile(m0: number, m1: number, n0: number, n1: number, k0: number, k1: number): PlanTile {
  return { device: m0 * 100 + n0 * 10 + k0, m0, m1, n0, n1, k0, k1, blocks: 4, done: 1 };
}

function plan(...tiles: PlanTile[]): Plan {
  const sides = { m: 8, n: 8, k: 6, predicted_s: null, elapsed_s: null };
  return { name: "g", generation: 1, tiles, ...sides };
}

// Left: two slabs in depth, the lower one cut in two. Right: three slabs.
const MIXED = plan(
  tile(0, 8, 0, 4, 3, 6),
  tile(0, 4, 0, 4, 0, 3),
  tile(4, 8, 0, 4, 0, 3),
  tile(0, 8, 4, 8, 0, 2),
  tile(0, 8, 4, 8, 2, 4),
  tile(0, 8, 4, 8, 4, 6),
);

test("regions of different depth: a tile lies in the slab after the one before it", () => {
  const { slabs, rectangles } = layOut(MIXED);
  expect(slabs).toBe(3);
  const slabOf = (n0: number, k0: number) =>
    rectangles.find(({ tile }) => tile.n0 === n0 && tile.k0 === k0)?.slab;
  expect([slabOf(0, 0), slabOf(0, 3)]).toEqual([0, 1]);
  expect([slabOf(4, 0), slabOf(4, 2), slabOf(4, 4)]).toEqual([0, 1, 2]);
});

test("the rectangles of the first slab cover it once", () => {
  const first = layOut(MIXED).rectangles.filter(({ slab }) => slab === 0);
  expect(first.reduce((sum, { width, height }) => sum + width * height, 0)).toBeCloseTo(1);
  expect(first.every(({ filled }) => filled === 0.25)).toBe(true);
});

test("panels stay inside their area and do not overlap", () => {
  for (const slabs of [1, 2, 5, 16]) {
    const all = panels(slabs, 320, 200, 10);
    expect(all.length).toBe(slabs);
    for (const panel of all) {
      expect(panel.x + panel.width).toBeLessThanOrEqual(320.001);
      expect(panel.y + panel.height).toBeLessThanOrEqual(200.001);
    }
    expect(new Set(all.map(({ x, y }) => `${x},${y}`)).size).toBe(slabs);
  }
});

test("no tiles, no slabs", () => {
  expect(layOut(plan())).toEqual({ slabs: 0, rectangles: [] });
  expect(panels(0, 100, 100, 10)).toEqual([]);
});

test("blocks add up", () => {
  expect(progress(MIXED)).toEqual({ blocks: 24, done: 6 });
});

test("a point finds its tile", () => {
  const one = plan(tile(0, 8, 0, 4, 0, 6), tile(0, 8, 4, 8, 0, 6));
  const size = { width: 200, height: 100 };
  expect(tileAt(layOut(one), size, 150, 50)?.tile.n0).toBe(4);
  expect(tileAt(layOut(one), size, 300, 50)).toBeUndefined();
});
