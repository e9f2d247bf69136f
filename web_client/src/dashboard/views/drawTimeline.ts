/** A device's last blocks on a canvas: one lane each for receiving, computing and sending. */

import { LANES, type Lane, type Span } from "../overview";
import { seconds } from "../text";
import type { Theme } from "../theme";
import { extent } from "../timeline";
import type { Size } from "./Canvas";

const LABELS_PX = 62;
const AXIS_PX = 18;
const GAP_PX = 5;

/** The colour of each lane. */
export function laneColours(theme: Theme): { readonly [name in Lane]: string } {
  return { receive: theme.soft, compute: theme.accent, send: theme.text };
}

/** Draw the spans; time runs to the right, up to the newest. */
export function drawTimeline(
  context: CanvasRenderingContext2D,
  size: Size,
  theme: Theme,
  spans: readonly Span[],
): void {
  const { start_s, end_s } = extent(spans);
  const width = size.width - LABELS_PX;
  const lane = (size.height - AXIS_PX) / LANES.length;
  const toX = (time_s: number) =>
    LABELS_PX + ((time_s - start_s) / Math.max(end_s - start_s, 1e-9)) * width;
  const colours = laneColours(theme);
  context.clearRect(0, 0, size.width, size.height);
  context.font = `12px ${theme.font}`;
  LANES.forEach((name, index) => {
    const y = index * lane;
    context.fillStyle = theme.soft;
    context.fillText(name, 0, y + lane / 2 + 4);
    context.fillStyle = theme.raised;
    context.fillRect(LABELS_PX, y + GAP_PX / 2, width, lane - GAP_PX);
  });
  for (const span of spans) {
    const y = LANES.indexOf(span.lane) * lane;
    const x = toX(span.start_s);
    context.fillStyle = colours[span.lane];
    // A block that took no time that a pixel shows is still there.
    const long = Math.max(1, toX(span.end_s) - x - 0.5);
    context.fillRect(x, y + GAP_PX / 2, long, lane - GAP_PX);
  }
  context.fillStyle = theme.soft;
  context.fillText(`${seconds(end_s - start_s)} ago`, LABELS_PX, size.height - 3);
  context.textAlign = "right";
  context.fillText("its newest", size.width, size.height - 3);
  context.textAlign = "left";
}
