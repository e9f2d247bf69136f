/** The last step by stages: what the server and each device did in it. */

import { bottleneck, serverParts } from "../breakdown";
import type { StepRecord } from "../records";
import { seconds } from "../text";

export function BreakdownView({ step }: { readonly step: StepRecord }) {
  const parts = serverParts(step).map(([name, part_s]) => `${name} ${seconds(part_s)}`);
  return (
    <section aria-labelledby="breakdown">
      <h3 id="breakdown">Where the time of step {step.step} went</h3>
      <p>{bottleneck(step)}</p>
      <p class="soft small">
        The server's own work took {seconds(step.ps_s)}
        {parts.length > 0 && `: ${parts.join(", ")}`}. Times of devices overlap; for links, they are
        bytes divided by the link's rate.
      </p>
      <section class="scroll" aria-label="Devices in the last step">
        <table class="plain">
          <thead>
            <tr>
              <th scope="col">device</th>
              <th scope="col">computed</th>
              <th scope="col">downlink</th>
              <th scope="col">uplink</th>
            </tr>
          </thead>
          <tbody>
            {step.devices.map((device, row) => (
              <tr key={row}>
                <th scope="row">{device.name}</th>
                <td>{seconds(device.compute_s)}</td>
                <td>{seconds(device.down_s)}</td>
                <td>{seconds(device.up_s)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </section>
    </section>
  );
}
