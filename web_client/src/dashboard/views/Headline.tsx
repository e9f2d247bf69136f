/** The figures that an operator looks at first. */

import { count, duration, quantity } from "../../ui/figures";
import { share } from "../fleet";
import type { Model } from "../model";
import type { Overview } from "../overview";
import { pace } from "../series";
import { carbon, loss, meanOf, percent } from "../text";
import { Figure } from "./Figure";

const CARD =
  "Bytes a second on the server's network. cleave serve --ps-gbit states the speed of its card.";

export function Headline(props: { readonly model: Model; readonly overview: Overview }) {
  const { job } = props.model;
  const { crowds, rates, card, totals, energy } = props.overview;
  const last = job?.step_records.at(-1);
  const done = last?.step ?? job?.step ?? 0;
  const recent = job === null ? null : pace(job.step_records, job.steps);
  const waits = job?.waits !== undefined && job.waits !== "";
  const running = job?.state === "running" && !waits;
  const busy = crowds.reduce((sum, { state, count }) => sum + (state === "busy" ? count : 0), 0);
  const mean = meanOf(rates.window_s);
  return (
    <section class="headline" aria-label="At a glance">
      <dl class="figures">
        <Figure
          name="Loss"
          value={last === undefined ? "–" : loss(last.loss)}
          note={done === 0 ? "no step yet" : `step ${stepOf(done, job?.steps ?? null)}`}
        />
        <Figure
          name="Tokens"
          value={recent === null ? "–" : `${tokens(recent.tokens_per_s)}/s`}
          note={recent === null ? undefined : lastSteps(recent.steps)}
        />
        <Figure
          name="Time left"
          value={running && recent?.left_s != null ? duration(recent.left_s) : "–"}
          note={job === null ? "no job" : waits ? "waiting" : job.state}
        />
        <Figure
          name="Devices"
          value={count(props.overview.devices_total)}
          note={`${count(busy)} busy`}
        />
        <Figure
          name="Multiplying"
          value={quantity(rates.flops_per_s, "FLOP/s")}
          note={`${mean}, ${quantity(totals.flops, "FLOP")} so far`}
          about="Additions and multiplications of numbers that devices do in a second."
        />
        <Figure
          name="To devices"
          value={quantity(rates.egress_bytes_per_s, "B/s")}
          note={`${mean}${ofCard(rates.egress_bytes_per_s, card.egress_bytes_per_s)}`}
          about={CARD}
        />
        <Figure
          name="From devices"
          value={quantity(rates.ingress_bytes_per_s, "B/s")}
          note={`${mean}${ofCard(rates.ingress_bytes_per_s, card.ingress_bytes_per_s)}`}
          about={CARD}
        />
        <Figure
          name="Carbon"
          value={carbon(energy.gco2e)}
          note={energy.gco2e === null ? "not known" : "CO₂ equivalent so far"}
        />
      </dl>
    </section>
  );
}

/** A step and how many there will be, e.g. `12 of 100`. */
export function stepOf(step: number, steps: number | null): string {
  return steps === null ? count(step) : `${count(step)} of ${count(steps)}`;
}

function tokens(per_s: number): string {
  return per_s < 100 ? per_s.toPrecision(3) : quantity(per_s, "");
}

function lastSteps(steps: number): string {
  return steps === 1 ? "in the last step" : `in the last ${steps} steps`;
}

function ofCard(rate: number | null, card: number | null): string {
  const part = share(rate, card);
  return part === null ? "" : `, ${percent(part)} of the card`;
}
