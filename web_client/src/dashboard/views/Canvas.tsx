/** A canvas as wide as its place and as sharp as the screen, drawn again when anything changes. */

import { useLayoutEffect, useRef } from "preact/hooks";
import { type Theme, useTheme } from "../theme";
import { useSize } from "./useSize";

/** In CSS pixels. */
export interface Size {
  readonly width: number;
  readonly height: number;
}

export type Draw = (context: CanvasRenderingContext2D, size: Size, theme: Theme) => void;

interface Props {
  /** What it shows, for who cannot see it. */
  readonly summary: string;
  readonly class: string;
  readonly draw: Draw;
  /** In CSS pixels; that of its class unless given. */
  readonly height?: number;
  /** What is at a point, for who hovers; "" for nothing. */
  readonly tell?: (x: number, y: number, size: Size) => string;
}

export function Canvas({ summary, class: name, draw, height, tell }: Props) {
  const place = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const size = useSize(place);
  const theme = useTheme();

  useLayoutEffect(() => {
    const node = canvas.current;
    const context = node?.getContext("2d") ?? null;
    if (node === null || context === null || size.width === 0) return;
    const scale = devicePixelRatio;
    node.width = Math.round(size.width * scale);
    node.height = Math.round(size.height * scale);
    context.scale(scale, scale);
    draw(context, size, theme);
  }, [size, theme, draw]);

  const hover = (event: MouseEvent) => {
    if (canvas.current === null || tell === undefined) return;
    canvas.current.title = tell(event.offsetX, event.offsetY, size);
  };
  return (
    <div
      class={`canvas ${name}`}
      ref={place}
      style={height === undefined ? {} : { height: `${height}px` }}
    >
      <canvas ref={canvas} role="img" aria-label={summary} onMouseMove={hover} />
    </div>
  );
}
