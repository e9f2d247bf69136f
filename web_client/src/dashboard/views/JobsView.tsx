/** The server's jobs: the queue, those that ended, and what an operator may do to them. */

import { count } from "../../ui/figures";
import type { Model } from "../model";
import type { JobRow } from "../overview";
import type { Change } from "../session";
import { loss } from "../text";
import { OTHER_COLOURS } from "./lossLines";

/** What the page does with a job. */
export interface JobActions {
  readonly compare: (job: string) => void;
  readonly change: (change: Change, job: string) => void;
  /** "": hide the log. */
  readonly showLog: (job: string) => void;
}

/** Which changes are possible in a state. */
const CHANGES: { readonly [state: string]: readonly Change[] } = {
  queued: ["pause", "stop"],
  running: ["pause", "stop"],
  paused: ["resume", "stop"],
  stopped: ["resume"],
  failed: ["resume"],
  interrupted: ["resume"],
};

interface Props extends JobActions {
  readonly model: Model;
  readonly jobs: readonly JobRow[];
  readonly operator: boolean;
}

export function JobsView({ model, jobs, operator, ...actions }: Props) {
  const { log, outcome } = model;
  return (
    <section class="card wide" aria-labelledby="jobs">
      <div class="title">
        <h2 id="jobs">Jobs</h2>
      </div>
      <section class="scroll" aria-label="Jobs of this server">
        <table class="plain jobs">
          <thead>
            <tr>
              <th scope="col">job</th>
              <th scope="col">model</th>
              <th scope="col">state</th>
              <th scope="col">step</th>
              <th scope="col">loss</th>
              <th scope="col">curve</th>
              {operator && <th scope="col">change</th>}
            </tr>
          </thead>
          <tbody>
            {jobs.map((job) => (
              <Row key={job.job} job={job} model={model} operator={operator} {...actions} />
            ))}
          </tbody>
        </table>
      </section>
      {outcome !== "" && <p role="status">{outcome}</p>}
      {log !== null && (
        <>
          <div class="title">
            <h3>Log of {log.job}, newest first</h3>
            <button type="button" class="quiet end" onClick={() => actions.showLog("")}>
              hide
            </button>
          </div>
          <pre class="log" tabIndex={0} aria-label={`Log of ${log.job}`}>
            {[...log.lines].reverse().join("\n") || "It has no records yet."}
          </pre>
        </>
      )}
    </section>
  );
}

interface RowProps extends JobActions {
  readonly job: JobRow;
  readonly model: Model;
  readonly operator: boolean;
}

function Row({ job, model, operator, compare, change, showLog }: RowProps) {
  const current = job.job === model.job?.job;
  const drawn = model.compared.has(job.job);
  const possible = CHANGES[job.state] ?? [];
  const changes = job.earlier ? possible.filter((each) => each === "resume") : possible;
  const full = model.compared.size >= OTHER_COLOURS.length;
  return (
    <tr>
      <th scope="row">{job.name === "" ? job.job : `${job.job} (${job.name})`}</th>
      <td data-name="model">{job.model}</td>
      <td data-name="state">{job.state}</td>
      <td data-name="step">
        {count(job.step)}
        {job.steps !== null && ` of ${count(job.steps)}`}
      </td>
      <td data-name="loss">{job.loss === null ? "–" : loss(job.loss)}</td>
      <td data-name="curve">
        {current || job.earlier ? (
          <span class="soft">{current ? "shown" : "before the restart"}</span>
        ) : (
          <button
            type="button"
            class="quiet"
            aria-pressed={drawn}
            disabled={!drawn && (full || job.step === 0)}
            onClick={() => compare(job.job)}
          >
            {drawn ? "hide" : "compare"}
            <span class="spoken"> {job.job}</span>
          </button>
        )}
      </td>
      {operator && (
        <td data-name="change" class="changes">
          {changes.map((each) => (
            <button
              key={each}
              type="button"
              class="quiet"
              onClick={() => {
                if (each === "stop" && !confirm(`Stop ${job.job}?`)) return;
                change(each, job.job);
              }}
            >
              {each}
              <span class="spoken"> {job.job}</span>
            </button>
          ))}
          {!job.earlier && (
            <button type="button" class="quiet" onClick={() => showLog(job.job)}>
              log<span class="spoken"> of {job.job}</span>
            </button>
          )}
        </td>
      )}
    </tr>
  );
}
