/** What the chart of losses shows, in lines and in words. */

import type uPlot from "uplot";
import type { EvalRecord, StepRecord } from "../records";
import { lossSeries, smooth } from "../series";
import { difference, loss } from "../text";
import type { Series } from "./Chart";

/** Another job whose losses are drawn as well. */
export interface OtherJob {
  readonly label: string;
  readonly steps: readonly StepRecord[];
}

/** Other jobs that fit a chart, each in a colour of its own. */
export const OTHER_COLOURS = ["warning", "bad", "text", "soft"] as const;

export interface LossLines {
  readonly data: uPlot.AlignedData;
  readonly series: readonly Series[];
  readonly summary: string;
  readonly note?: string;
}

/**
 * A job's losses, and those of the run that it is compared with, if there is one.
 *
 * @param largest_difference from the compared run's losses so far; null where none was compared
 * @param others other jobs, of which the running means are drawn
 */
export function lossLines(
  steps: readonly StepRecord[],
  evals: readonly EvalRecord[],
  largest_difference: number | null,
  others: readonly OtherJob[] = [],
): LossLines {
  const series = lossSeries(
    steps,
    evals,
    others.map((other) => other.steps),
  );
  const [at, losses = [], held = [], against = [], ...theirs] = series;
  const trend = trendOf(losses);
  const compared = steps.filter((record) => record.against_loss !== null).at(-1);
  const largest =
    largest_difference === null ? null : `largest difference ${difference(largest_difference)}`;
  const lines: readonly (Series & { readonly values: readonly (number | null)[] })[] = [
    {
      label: compared === undefined && others.length === 0 ? "step" : "this job",
      colour: "soft",
      value: figure(losses),
      values: losses,
    },
    {
      label: "running mean",
      colour: "accent",
      thick: true,
      value: figure(trend),
      values: trend,
    },
    // Over the others, which it mostly covers: the gaps between its dashes show them.
    ...(compared !== undefined
      ? [
          {
            label: "compared run",
            colour: "text" as const,
            dashed: true,
            thick: true,
            value: figure(against),
            values: against,
          },
        ]
      : []),
    ...others.map(({ label }, index) => {
      const values = trendOf(theirs[index] ?? []);
      return {
        label,
        colour: OTHER_COLOURS[index % OTHER_COLOURS.length] ?? "text",
        dashed: true,
        thick: true,
        spans: true,
        value: newest(values),
        values,
      };
    }),
    ...(evals.length > 0
      ? [
          {
            label: "held out",
            colour: "warning" as const,
            points: true,
            value: newest(held),
            values: held,
          },
        ]
      : []),
  ];
  return {
    data: [at, ...lines.map(({ values }) => values)] as uPlot.AlignedData,
    series: lines.map(({ values: _, ...series }) => series),
    summary: [range(steps), comparison(compared, largest)].filter((part) => part !== "").join(" "),
    ...(largest === null ? {} : { note: largest }),
  };
}

/** The running mean, where there is a loss. */
function trendOf(values: readonly (number | null)[]): (number | null)[] {
  const means = smooth(values.filter((value) => value !== null));
  let at = 0;
  return values.map((value) => (value === null ? null : (means[at++] ?? null)));
}

function range(steps: readonly StepRecord[]): string {
  const first = steps[0];
  const last = steps.at(-1);
  if (first === undefined || last === undefined) return "No step yet.";
  return `From ${loss(first.loss)} at step ${first.step} to ${loss(last.loss)} at step ${last.step}.`;
}

function comparison(compared: StepRecord | undefined, largest: string | null): string {
  if (compared?.against_loss == null) return "";
  const had = `The compared run had ${loss(compared.against_loss)} at step ${compared.step}`;
  return largest === null ? `${had}.` : `${had}; ${largest}.`;
}

function figure(values: readonly (number | null)[]): (index: number) => string {
  return (index) => {
    const value = values[index];
    return value == null ? "–" : loss(value);
  };
}

/** The newest value up to an index: held-out losses are few. */
function newest(values: readonly (number | null)[]): (index: number) => string {
  return (index) => {
    for (let i = index; i >= 0; i -= 1) {
      const value = values[i];
      if (value != null) return loss(value);
    }
    return "–";
  };
}
