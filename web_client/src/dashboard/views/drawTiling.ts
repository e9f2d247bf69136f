/** A tiling on a canvas: one panel a slab, tiles filled from below by the blocks that are back. */

import type { Theme } from "../theme";
import { type Panel, panels, type Rectangle, type Tiling } from "../tiling";
import type { Size } from "./Canvas";

const GAP = 10;
const HEADING = 16;

/** Draw it; the tiles of the device `chosen` are framed. */
export function drawTiling(
  context: CanvasRenderingContext2D,
  size: Size,
  theme: Theme,
  tiling: Tiling,
  chosen: number,
): void {
  const at = places(tiling, size);
  context.clearRect(0, 0, size.width, size.height);
  context.font = `12px ${theme.font}`;
  context.fillStyle = theme.soft;
  if (at.length > 1)
    at.forEach((panel, slab) => {
      context.fillText(`slab ${slab + 1}`, panel.x, panel.y - 5);
    });
  // What is framed comes last, so that no neighbour covers its frame.
  for (const framed of [false, true])
    for (const rectangle of tiling.rectangles) {
      const panel = at[rectangle.slab];
      if (panel === undefined || (rectangle.tile.device === chosen) !== framed) continue;
      drawTile(context, boxOf(rectangle, panel), rectangle.filled, theme, framed);
    }
}

/** The tile at a point, if there is one. */
export function tileAt(tiling: Tiling, size: Size, x: number, y: number): Rectangle | undefined {
  const at = places(tiling, size);
  return tiling.rectangles.find((rectangle) => {
    const panel = at[rectangle.slab];
    if (panel === undefined) return false;
    const box = boxOf(rectangle, panel);
    return x >= box.x && x < box.x + box.width && y >= box.y && y < box.y + box.height;
  });
}

/** Where the slabs' panels lie; each of several has its heading above it. */
function places(tiling: Tiling, size: Size): Panel[] {
  const all = panels(tiling.slabs, size.width, size.height, GAP);
  if (tiling.slabs === 1) return all;
  return all.map((panel) => ({ ...panel, y: panel.y + HEADING, height: panel.height - HEADING }));
}

function boxOf(rectangle: Rectangle, panel: Panel): Panel {
  return {
    x: panel.x + rectangle.x * panel.width,
    y: panel.y + rectangle.y * panel.height,
    width: rectangle.width * panel.width,
    height: rectangle.height * panel.height,
  };
}

function drawTile(
  context: CanvasRenderingContext2D,
  box: Panel,
  share: number,
  theme: Theme,
  framed: boolean,
): void {
  const filled = box.height * share;
  context.fillStyle = theme.accentSoft;
  context.fillRect(box.x, box.y, box.width, box.height);
  context.fillStyle = theme.accent;
  context.fillRect(box.x, box.y + box.height - filled, box.width, filled);
  context.strokeStyle = framed ? theme.text : theme.surface;
  context.lineWidth = framed ? 3 : Math.min(1, box.width / 4, box.height / 4);
  context.strokeRect(box.x, box.y, box.width, box.height);
}
