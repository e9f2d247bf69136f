/** Energy and carbon so far, and what had to be assumed for them. */

import { count } from "../../ui/figures";
import type { Energy } from "../overview";
import { carbon, counted, energy as inWords } from "../text";
import { Figure } from "./Figure";

export function EnergyView(props: { readonly energy: Energy }) {
  const { devices_j, ps_j, ps_basis, gco2e, devices_known, devices_unknown, assumed } =
    props.energy;
  return (
    <section class="card" aria-labelledby="energy">
      <div class="title">
        <h2 id="energy">Energy and carbon so far</h2>
      </div>
      <dl class="figures">
        <Figure
          name="Devices"
          value={inWords(devices_j)}
          note={known(devices_known, devices_unknown)}
        />
        <Figure
          name="Server"
          value={inWords(ps_j)}
          note={ps_j === null ? "not known" : ps_basis}
          about="The machine that runs the server, with everything that it does."
        />
        <Figure
          name="Carbon"
          value={carbon(gco2e)}
          note={gco2e === null ? "not known" : "CO₂ equivalent"}
        />
      </dl>
      {assumed.length > 0 && (
        <>
          <h3 class="soft small">Assumed</h3>
          <ul class="small soft assumed">
            {assumed.map((sentence) => (
              <li key={sentence}>{sentence}</li>
            ))}
          </ul>
        </>
      )}
    </section>
  );
}

function known(devices: number | null, others: number | null): string {
  if (devices === null || others === null) return "not known";
  return `${count(devices)} of ${counted(devices + others, "device")}`;
}
