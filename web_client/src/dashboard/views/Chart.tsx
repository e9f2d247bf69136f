/** A uPlot chart with its legend, and what it shows in words. */

import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { type Colour, type Theme, useTheme } from "../theme";
import { useSize } from "./useSize";

export interface Series {
  readonly label: string;
  readonly colour: Colour;
  /** Filled down to the series before it (the first: to 0), in this colour. */
  readonly fill?: Colour;
  readonly dashed?: boolean;
  /** Points only, without a line. */
  readonly points?: boolean;
  /** It is drawn where it fits, but the scale is made without it. */
  readonly unscaled?: boolean;
  readonly thick?: boolean;
  /** Drawn on where values are missing. */
  readonly spans?: boolean;
  /** The figure at an index of the data, for the legend. */
  readonly value: (index: number) => string;
}

interface Props {
  readonly title: string;
  /** What the chart shows, for who cannot see it. */
  readonly summary: string;
  readonly series: readonly Series[];
  readonly data: uPlot.AlignedData;
  /** What stands after the legend; `summary` has to say it too. */
  readonly note?: string;
  /** What stands below the x axis; else x are whole numbers, of steps or the like. */
  readonly xText?: (value: number) => string;
  /** y begins at 0. */
  readonly fromZero?: boolean;
  /** With `fromZero`: y ends here at most, and what is above leaves the chart. */
  readonly most?: number;
  readonly axisText: (value: number) => string;
}

const HEIGHT = 176;

export function Chart(props: Props) {
  const { title, summary, series, data, xText = null, fromZero = false, axisText } = props;
  const most = props.most ?? Number.POSITIVE_INFINITY;
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const { width } = useSize(place);
  const theme = useTheme();
  const [at, setAt] = useState<number | null>(null);
  const look = series.map(({ value: _, ...rest }) => rest);
  const key = JSON.stringify(look);

  // `key` stands for the looks of the series, which are new objects at every call.
  const options = useMemo(
    () => chartOptions(look, theme, { xText, fromZero, most, axisText, setAt }),
    [key, theme, xText, fromZero, most, axisText],
  );

  // Data and width are left out: they are set below, without making the chart anew.
  useLayoutEffect(() => {
    if (place.current === null || width === 0) return;
    const made = new uPlot({ ...options, width, height: HEIGHT }, data, place.current);
    plot.current = made;
    return () => {
      plot.current = null;
      made.destroy();
    };
  }, [options, width === 0]);
  useLayoutEffect(() => plot.current?.setData(data), [data]);
  useEffect(() => {
    if (width > 0) plot.current?.setSize({ width, height: HEIGHT });
  }, [width]);

  const last = data[0].length - 1;
  const shown = at === null || at > last ? last : at;
  return (
    <figure class="chart">
      <figcaption>
        <h3>{title}</h3>
        <ul class="legend" aria-hidden="true">
          {series.map(({ label, colour, dashed, value }) => (
            <li key={label}>
              <span class={`swatch ${colour} ${dashed ? "dashed" : ""}`} />
              {label} <b>{shown >= 0 ? value(shown) : "–"}</b>
            </li>
          ))}
          {props.note !== undefined && <li>{props.note}</li>}
        </ul>
      </figcaption>
      <div class="plot" ref={place} role="img" aria-label={`${title}. ${summary}`} />
    </figure>
  );
}

interface Behaviour {
  readonly xText: ((value: number) => string) | null;
  readonly fromZero: boolean;
  readonly most: number;
  readonly axisText: (value: number) => string;
  readonly setAt: (index: number | null) => void;
}

function chartOptions(
  series: readonly Omit<Series, "value">[],
  theme: Theme,
  { xText, fromZero, most, axisText, setAt }: Behaviour,
): Omit<uPlot.Options, "width" | "height"> {
  const axis = {
    stroke: theme.soft,
    font: `12px ${theme.font}`,
    grid: { stroke: theme.line, width: 1 },
    ticks: { show: false },
  };
  return {
    padding: [8, xText === null ? 12 : 30, 0, 0],
    legend: { show: false },
    cursor: { y: false, drag: { setScale: false, x: false }, points: { show: false } },
    scales: {
      x: { time: false },
      y: fromZero ? { range: (_, __, high) => [0, high > 0 ? Math.min(high, most) * 1.1 : 1] } : {},
    },
    axes: [
      { ...axis, grid: { show: false }, size: 32, gap: 10, space: 72, ...xAxis(xText) },
      { ...axis, size: 64, space: 32, values: (_, ticks) => ticks.map(axisText) },
    ],
    series: [
      {},
      ...series.map((each) => ({
        label: each.label,
        stroke: theme[each.colour],
        width: each.points ? 0 : each.thick ? 2 : 1.25,
        ...(each.fill ? { fill: theme[each.fill] } : {}),
        ...(each.dashed ? { dash: [6, 5] } : {}),
        ...(each.unscaled ? { auto: false } : {}),
        ...(each.spans ? { spanGaps: true } : {}),
        points: each.points
          ? { show: true, size: 7, fill: theme[each.colour], stroke: theme[each.colour] }
          : { show: false },
      })),
    ],
    bands: series.flatMap((each, index) =>
      each.fill && index > 0
        ? [{ series: [index + 1, index] as [number, number], fill: theme[each.fill] }]
        : [],
    ),
    hooks: { setCursor: [(self: uPlot) => setAt(self.cursor.idx ?? null)] },
  };
}

function xAxis(xText: ((value: number) => string) | null): Partial<uPlot.Axis> {
  if (xText === null) return { incrs: WHOLE };
  return { incrs: SPANS, values: (_, ticks) => ticks.map(xText) };
}

/** Seconds between ticks of a time axis. */
const SPANS = [1, 5, 10, 15, 30, 60, 120, 300, 600];
/** Steps are whole: no tick between two of them. */
const WHOLE = [
  1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6,
];
