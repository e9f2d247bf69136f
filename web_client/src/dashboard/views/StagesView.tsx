/** The step by stages that is under way, or was last: who holds which layers, and how far it is. */

import { count } from "../../ui/figures";
import { nameOf } from "../fleet";
import type { Device } from "../overview";
import {
  doing,
  type Holder,
  inFlight,
  layersOf,
  progressOf,
  type Stage,
  type StageStep,
} from "../stages";
import { counted, percent } from "../text";
import { Figure } from "./Figure";

interface Props {
  readonly step: StageStep;
  readonly devices: readonly Device[];
  readonly chosen: number;
  readonly choose: (device: number) => void;
}

export function StagesView({ step, devices, chosen, choose }: Props) {
  const done = progressOf(step);
  return (
    <section class="card" aria-labelledby="stages">
      <div class="title">
        <h2 id="stages">Stages</h2>
        <p class="soft">
          {counted(step.stages.length, "stage")},{" "}
          {counted(step.batches, "micro-batch", "micro-batches")}
        </p>
        {step.ended && <p class="chip">step over</p>}
      </div>
      <progress max={1} value={done} aria-label="Of the step">
        {percent(done)}
      </progress>
      <section class="scroll stage-list" aria-label="Stages and their devices">
        <table class="plain stages">
          <thead>
            <tr>
              <th scope="col">layers</th>
              <th scope="col">devices</th>
              <th scope="col">forward</th>
              <th scope="col">backward</th>
              <th scope="col" title="Micro-batches whose gradients the server has added up">
                summed
              </th>
            </tr>
          </thead>
          <tbody>
            {step.stages.map((stage) => (
              <Row
                key={layersOf(stage)}
                stage={stage}
                batches={step.batches}
                devices={devices}
                chosen={chosen}
                choose={choose}
              />
            ))}
          </tbody>
        </table>
      </section>
      <dl class="figures">
        <Figure name="In flight" value={count(inFlight(step))} note="micro-batches on devices" />
        <Figure
          name="Done again"
          value={count(step.repeated)}
          note="passes, because a device was lost"
        />
        {step.logged !== null && (
          <Figure
            name="Since the snapshot"
            value={count(step.logged)}
            note="steps, which a device repeats if it takes over layers"
          />
        )}
      </dl>
    </section>
  );
}

/** Devices of a stage that are named; of more, the others are counted. */
const NAMED = 6;

function Row(props: {
  readonly stage: Stage;
  readonly batches: number;
  readonly devices: readonly Device[];
  readonly chosen: number;
  readonly choose: (device: number) => void;
}) {
  const { stage, batches, devices, chosen, choose } = props;
  const named = stage.holders.slice(0, NAMED);
  const others = stage.devices - named.length;
  return (
    <tr>
      <th scope="row">{layersOf(stage)}</th>
      <td class="holders">
        {stage.devices === 0 && <span class="warning-text">waits for a device</span>}
        {named.map((holder) => (
          <HolderLine
            key={holder.device}
            holder={holder}
            device={devices.find((each) => each.device === holder.device)}
            pressed={holder.device === chosen}
            choose={choose}
          />
        ))}
        {others > 0 && <span class="soft">and {count(others)} more</span>}
      </td>
      <Passed name="forward" number={stage.forward} of={batches} />
      <Passed name="backward" number={stage.backward} of={batches} />
      <Passed name="summed" number={stage.landed} of={batches} />
    </tr>
  );
}

function HolderLine(props: {
  readonly holder: Holder;
  readonly device: Device | undefined;
  readonly pressed: boolean;
  readonly choose: (device: number) => void;
}) {
  const { holder, device, pressed, choose } = props;
  const name = device === undefined ? `device ${holder.device}` : nameOf(device);
  return (
    <span class="holder">
      <button
        type="button"
        class="quiet"
        aria-pressed={pressed}
        onClick={() => choose(holder.device)}
      >
        {name}
      </button>{" "}
      <span class="soft small">
        {device?.own === true && "own, "}
        {doing(holder)}
      </span>
    </span>
  );
}

function Passed(props: { readonly name: string; readonly number: number; readonly of: number }) {
  return (
    <td data-name={props.name}>
      {count(props.number)} of {count(props.of)}
    </td>
  );
}
