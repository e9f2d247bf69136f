/** What devices did lately on a canvas: a row for each, a lane for each thing that it does. */

import { LANES, type Lane, type Span, type Stream } from "../overview";
import { seconds } from "../text";
import type { Theme } from "../theme";
import type { Size } from "./Canvas";
import { laneColours } from "./drawTimeline";

const NAMES_SHARE = 0.4; // of the width, at most
const ROW_PX = 22;
const GAP_PX = 4;
const LINE_PX = 18;
const LETTER_PX = 7;
const LANE_PX = (ROW_PX - GAP_PX) / LANES.length;
const LAST_LETTERS = 6;

type NameOf = (device: number) => string;

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
  nameOf: NameOf,
): void {
  const colours = laneColours(theme);
  const left = namesPx(size, stream, nameOf);
  const width = size.width - left;
  context.clearRect(0, 0, size.width, size.height);
  context.font = `12px ${theme.font}`;
  stream.devices.forEach(({ device, spans }, row) => {
    const y = row * ROW_PX;
    context.fillStyle = theme.text;
    context.fillText(shortened(nameOf(device), left), 0, y + ROW_PX / 2 + 3);
    context.fillStyle = theme.raised;
    context.fillRect(left, y, width, ROW_PX - GAP_PX);
    for (const span of spans) {
      const [x, long] = placeOf(span, left, width, stream.window_s);
      context.fillStyle = colours[span.lane];
      context.fillRect(x, y + LANES.indexOf(span.lane) * LANE_PX, long, LANE_PX - 1);
    }
  });
  const axis = stream.devices.length * ROW_PX + LINE_PX - 4;
  context.fillStyle = theme.soft;
  context.fillText(`${seconds(stream.window_s)} ago`, left, axis);
  context.textAlign = "right";
  context.fillText("now", size.width, axis);
  context.textAlign = "left";
  drawKey(context, left, axis + LINE_PX, theme, colours);
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
  nameOf: NameOf,
): { readonly device: number; readonly span: Span } | null {
  const row = stream.devices[Math.floor(y / ROW_PX)];
  if (row === undefined) return null;
  const lane = LANES[Math.floor((y % ROW_PX) / LANE_PX)];
  const names = namesPx(size, stream, nameOf);
  const span = row.spans.find((one) => {
    const [left, long] = placeOf(one, names, size.width - names, stream.window_s);
    return one.lane === lane && left <= x && x <= left + long;
  });
  return span === undefined ? null : { device: row.device, span };
}

/** Where a span begins and how long it is, in pixels; what began before the window is cut. */
function placeOf(
  span: Span,
  left: number,
  width: number,
  window_s: number,
): readonly [number, number] {
  const toX = (time_s: number) => left + (1 + Math.max(time_s, -window_s) / window_s) * width;
  const x = toX(span.start_s);
  // What took no time that a pixel shows is still there.
  return [x, Math.max(1, toX(span.end_s) - x)];
}

/** The width of the names: as much as the longest needs, if there is room. */
export function namesPx(size: Size, stream: Stream, nameOf: NameOf): number {
  const longest = Math.max(0, ...stream.devices.map(({ device }) => nameOf(device).length));
  return Math.min(LETTER_PX * (longest + 1), Math.floor(NAMES_SHARE * size.width));
}

/** A name as far as there is room; devices of a kind differ at the end of theirs. */
export function shortened(name: string, room_px: number): string {
  const most = Math.floor(room_px / LETTER_PX) - 1;
  if (name.length <= most) return name;
  const first = name.slice(0, Math.max(0, most - LAST_LETTERS - 1));
  return `${first}…${name.slice(-LAST_LETTERS)}`;
}
