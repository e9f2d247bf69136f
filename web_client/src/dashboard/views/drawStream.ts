/** What devices did lately on a canvas: a row for each, a lane for each thing that it does. */

import { LANES, type Lane, type Span, type Stream } from "../overview";
import { seconds } from "../text";
import type { Theme } from "../theme";
import type { Size } from "./Canvas";
import { laneColours } from "./drawTimeline";

const NAMES_PX = 104;
const ROW_PX = 22;
const GAP_PX = 4;
const LINE_PX = 18;
const LETTER_PX = 7;
const LANE_PX = (ROW_PX - GAP_PX) / LANES.length;

/** The height that a stream needs, in CSS pixels. */
export function heightOf(stream: Stream): number {
  return stream.devices.length * ROW_PX + 2 * LINE_PX;
}

/** Draw the stream; time runs to the right, up to now. */
export function drawStream(
  context: CanvasRenderingContext2D,
  size: Size,
  theme: Theme,
  stream: Stream,
  nameOf: (device: number) => string,
): void {
  const colours = laneColours(theme);
  const width = size.width - NAMES_PX;
  context.clearRect(0, 0, size.width, size.height);
  context.font = `12px ${theme.font}`;
  stream.devices.forEach(({ device, spans }, row) => {
    const y = row * ROW_PX;
    context.fillStyle = theme.text;
    context.fillText(shortened(nameOf(device)), 0, y + ROW_PX / 2 + 3);
    context.fillStyle = theme.raised;
    context.fillRect(NAMES_PX, y, width, ROW_PX - GAP_PX);
    for (const span of spans) {
      const [x, long] = placeOf(span, width, stream.window_s);
      context.fillStyle = colours[span.lane];
      context.fillRect(x, y + LANES.indexOf(span.lane) * LANE_PX, long, LANE_PX - 1);
    }
  });
  const axis = stream.devices.length * ROW_PX + LINE_PX - 4;
  context.fillStyle = theme.soft;
  context.fillText(`${seconds(stream.window_s)} ago`, NAMES_PX, axis);
  context.textAlign = "right";
  context.fillText("now", size.width, axis);
  context.textAlign = "left";
  drawKey(context, NAMES_PX, axis + LINE_PX, theme, colours);
}

function drawKey(
  context: CanvasRenderingContext2D,
  left: number,
  y: number,
  theme: Theme,
  colours: { readonly [name in Lane]: string },
): void {
  LANES.forEach((lane, number) => {
    const x = left + number * 76;
    context.fillStyle = colours[lane];
    context.fillRect(x, y - 8, 9, 9);
    context.fillStyle = theme.text;
    context.fillText(lane, x + 14, y);
  });
}

/** The span at a point and its device; null where there is none. */
export function spanAt(
  x: number,
  y: number,
  size: Size,
  stream: Stream,
): { readonly device: number; readonly span: Span } | null {
  const row = stream.devices[Math.floor(y / ROW_PX)];
  if (row === undefined) return null;
  const lane = LANES[Math.floor((y % ROW_PX) / LANE_PX)];
  const width = size.width - NAMES_PX;
  const span = row.spans.find((one) => {
    const [left, long] = placeOf(one, width, stream.window_s);
    return one.lane === lane && left <= x && x <= left + long;
  });
  return span === undefined ? null : { device: row.device, span };
}

/** Where a span begins and how long it is, in pixels; what began before the window is cut. */
function placeOf(span: Span, width: number, window_s: number): readonly [number, number] {
  const toX = (time_s: number) => NAMES_PX + (1 + Math.max(time_s, -window_s) / window_s) * width;
  const x = toX(span.start_s);
  // What took no time that a pixel shows is still there.
  return [x, Math.max(1, toX(span.end_s) - x)];
}

function shortened(name: string): string {
  const most = Math.floor(NAMES_PX / LETTER_PX);
  return name.length <= most ? name : `${name.slice(0, most - 1)}…`;
}
