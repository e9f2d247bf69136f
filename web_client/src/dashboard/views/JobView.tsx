/** The job: how far, at which loss, where a step's time goes. */

import { useMemo } from "preact/hooks";
import type { JobModel } from "../model";
import type { FinishedGemm } from "../overview";
import { type Pace, pace, scaleTop, timeSeries } from "../series";
import { count } from "../../ui/figures";
import { percent, seconds, timeOfDay } from "../text";
import { BreakdownView } from "./BreakdownView";
import { Chart } from "./Chart";
import { Figure } from "./Figure";
import { GemmChart } from "./GemmChart";
import { stepOf } from "./Headline";
import { lossLines, type OtherJob } from "./lossLines";

export function JobView(props: {
  readonly job: JobModel | null;
  readonly gemms: readonly FinishedGemm[];
  readonly devices: number;
  readonly others: readonly OtherJob[];
}) {
  const { job } = props;
  if (job === null) return <NoJob devices={props.devices} />;
  const last = job.step_records.at(-1);
  const done = last?.step ?? job.step;
  const recent = pace(job.step_records, job.steps);
  return (
    <section class="card wide" aria-labelledby="job">
      <div class="title">
        <h2 id="job">Job {job.job}</h2>
        <p class="soft">{job.model}</p>
        {job.waits === "" ? (
          <p class={`chip ${stateTone(job.state)}`}>{job.state}</p>
        ) : (
          <p class="chip warning">waiting</p>
        )}
        {job.started_s !== null && <p class="soft small end">since {timeOfDay(job.started_s)}</p>}
      </div>
      {job.steps !== null && (
        <progress max={job.steps} value={done} aria-label="Steps done">
          {done}
        </progress>
      )}
      <dl class="figures">
        <Figure name="Step" value={stepOf(done, job.steps)} note={tasksOf(job.tasks)} />
        <Figure
          name="Step time"
          value={seconds(recent?.step_s ?? null)}
          note="median of the last steps"
        />
        <Figure
          name="On the server"
          value={seconds(recent?.ps_s ?? null)}
          note={part(recent, "ps_s")}
          about="Time of a step in which the server computes: the loss, the update of the weights, and what it does not give to devices."
        />
        <Figure
          name="On devices"
          value={seconds(recent?.fleet_s ?? null)}
          note={part(recent, "fleet_s")}
          about="Time of a step in which the server waits for devices: they receive, compute and send."
        />
        <Figure
          name="Traffic"
          value={recent?.traffic_ratio == null ? "–" : `${recent.traffic_ratio.toFixed(2)} ×`}
          note="of the least without compression"
          about="Bytes sent and received in a step, divided by the fewest that this step needs without compression. Compression lowers it, and repeated work raises it."
        />
      </dl>
      {job.step_records.length > 0 ? (
        <div class="charts">
          <LossChart job={job} others={props.others} />
          <TimeChart job={job} />
          {props.gemms.length > 1 && <GemmChart gemms={props.gemms} />}
        </div>
      ) : (
        <p class="soft empty">The first step is under way; charts begin after it.</p>
      )}
      {last !== undefined && last.devices.length > 0 && <BreakdownView step={last} />}
      {job.notes.length > 0 && <p class="soft small note-line">Last note: {job.notes.at(-1)}</p>}
    </section>
  );
}

/** How far the next step is, if it is under way. */
export function tasksOf(tasks: readonly [number, number] | null): string | undefined {
  if (tasks === null) return undefined;
  const [done, of] = tasks;
  return `next: task ${count(done)}${of > 0 ? ` of ${count(of)}` : ""}`;
}

function NoJob(props: { readonly devices: number }) {
  return (
    <section class="card wide" aria-labelledby="job">
      <div class="title">
        <h2 id="job">No job</h2>
      </div>
      <p>
        Nothing is being trained.
        {props.devices === 0 ? " No device is connected either." : ""} Start a job on the server's
        machine: <code>cleave train --model NAME --data FILE</code>
      </p>
    </section>
  );
}

function LossChart(props: { readonly job: JobModel; readonly others: readonly OtherJob[] }) {
  const { step_records, eval_records, largest_difference } = props.job;
  const lines = useMemo(
    () => lossLines(step_records, eval_records, largest_difference, props.others),
    [step_records, eval_records, largest_difference, props.others],
  );
  return <Chart title="Loss" axisText={fourDigits} {...lines} />;
}

function TimeChart(props: { readonly job: JobModel }) {
  const { step_records } = props.job;
  const data = useMemo(() => timeSeries(step_records), [step_records]);
  const clock = step_records.at(-1)?.clock ?? "wall";
  const recent = pace(step_records, null);
  const most = useMemo(() => scaleTop(data[2]), [data]);
  const summary =
    recent === null
      ? "No step yet."
      : `In the last steps ${seconds(recent.ps_s)} for the server and ${seconds(recent.fleet_s)} for the devices.`;
  return (
    <Chart
      title={clock === "virtual" ? "Step time, fleet on its virtual clock" : "Step time"}
      summary={summary}
      data={data}
      fromZero
      most={most}
      axisText={seconds}
      series={[
        {
          label: "server",
          colour: "soft",
          fill: "line",
          value: (i) => seconds(data[1][i] ?? null),
        },
        {
          label: "waiting for devices",
          colour: "accent",
          fill: "accentSoft",
          value: (i) => seconds((data[2][i] ?? 0) - (data[1][i] ?? 0)),
        },
      ]}
    />
  );
}

function fourDigits(value: number): string {
  return String(Number(value.toPrecision(4)));
}

function part(recent: Pace | null, of: "ps_s" | "fleet_s"): string {
  if (recent === null || recent.ps_s + recent.fleet_s <= 0) return "–";
  return `${percent(recent[of] / (recent.ps_s + recent.fleet_s))} of a step`;
}

function stateTone(state: string): string {
  if (state === "failed") return "bad";
  return state === "running" ? "good" : "neutral";
}
