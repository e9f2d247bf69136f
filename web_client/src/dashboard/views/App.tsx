/** The whole page. */

import { useEffect, useMemo } from "preact/hooks";
import { duration } from "../../ui/figures";
import type { Model } from "../model";
import type { Overview } from "../overview";
import { pace } from "../series";
import { serverLoads } from "../text";
import { EnergyView } from "./EnergyView";
import { EventsView } from "./EventsView";
import { FleetView } from "./FleetView";
import { Headline } from "./Headline";
import { type JobActions, JobsView } from "./JobsView";
import { JobView } from "./JobView";
import type { OtherJob } from "./lossLines";
import { NetworkView } from "./NetworkView";
import { Connecting, Refused, Stale, Waiting } from "./Notice";
import { PlanView } from "./PlanView";
import { StagesView } from "./StagesView";
import { StreamView } from "./StreamView";

interface Props extends JobActions {
  readonly model: Model;
  readonly choose: (device: number) => void;
}

export function App({ model, choose, ...actions }: Props) {
  const others = useMemo(() => othersOf(model.compared), [model.compared]);
  const { link, overview, job } = model;
  useTitle(model);
  if (link.kind === "refused") return <Refused code={link.code} text={link.text} />;
  if (overview === null) return <Connecting model={model} />;
  return (
    <>
      <TopBar overview={overview} live={link.kind === "open"} />
      <Stale model={model} />
      {job !== null && <Waiting job={job} />}
      <main class="page">
        <Headline model={model} overview={overview} />
        <JobView job={job} gemms={model.gemms} devices={overview.devices.length} others={others} />
        {overview.jobs.length > (overview.operator ? 0 : 1) && (
          <JobsView model={model} jobs={overview.jobs} operator={overview.operator} {...actions} />
        )}
        {overview.stages !== null && (
          <StagesView
            step={overview.stages}
            devices={overview.devices}
            chosen={model.chosen}
            choose={choose}
          />
        )}
        {(overview.stages === null || overview.plan !== null) && (
          <PlanView
            plan={overview.plan}
            devices={overview.devices}
            chosen={model.chosen}
            waits={job !== null && job.waits !== ""}
          />
        )}
        <NetworkView overview={overview} samples={model.samples} />
        {overview.stream !== null && overview.stream.devices.length > 0 && (
          <StreamView stream={overview.stream} devices={overview.devices} />
        )}
        <FleetView overview={overview} chosen={model.chosen} choose={choose} />
        <EventsView events={model.events} now_s={overview.server.now_s} />
        <EnergyView energy={overview.energy} />
      </main>
    </>
  );
}

function othersOf(compared: Model["compared"]): OtherJob[] {
  return [...compared].map(([label, { job }]) => ({ label, steps: job?.step_records ?? [] }));
}

function TopBar(props: { readonly overview: Overview; readonly live: boolean }) {
  const { server } = props.overview;
  return (
    <header class="top">
      <h1>
        Cleave <span class="soft">{server.name}</span>
      </h1>
      <p class="soft small">
        up {duration(Math.max(0, server.now_s - server.started_s))} · version {server.version}
        {server.verify !== "" && ` · checks ${server.verify}`}
        {server.servers.length > 0 && ` · ${serverLoads(server.servers)}`}
      </p>
      <p class={`chip ${props.live ? "good" : "bad"}`}>{props.live ? "live" : "not connected"}</p>
    </header>
  );
}

/** The tab's title says how far the job is: it can be read without looking at the page. */
function useTitle({ job, overview, link }: Model): void {
  const step = job?.step_records.at(-1)?.step;
  const left_s = job === null ? null : (pace(job.step_records, job.steps)?.left_s ?? null);
  const waits = job !== null && job.waits !== "";
  const running = job !== null && job.state === "running" && step !== undefined;
  const left = left_s === null ? "" : `, ${duration(left_s)} left`;
  const title = waits
    ? "Waiting · Cleave"
    : running
      ? `Step ${step}${left} · Cleave`
      : `${overview?.server.name || "Dashboard"} · Cleave`;
  useEffect(() => {
    document.title = link.kind === "open" ? title : "Cleave, not connected";
  }, [title, link.kind]);
}
