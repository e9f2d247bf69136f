/** What the server sends and receives, compared with what its network card can. */

import { useMemo } from "preact/hooks";
import type uPlot from "uplot";
import { quantity } from "../../ui/figures";
import { share } from "../fleet";
import type { Sample } from "../model";
import type { Overview } from "../overview";
import { meanOf, percent, timeOfDay } from "../text";
import type { Traffic } from "../traffic";
import { Chart, type Series } from "./Chart";

export function NetworkView(props: {
  readonly overview: Overview;
  readonly samples: readonly Sample[];
}) {
  const { rates, card, totals, traffic } = props.overview;
  const { samples } = props;
  const data = useMemo(
    () =>
      [
        samples.map((sample) => sample.time_s),
        samples.map((sample) => sample.egress_bytes_per_s),
        samples.map((sample) => sample.ingress_bytes_per_s),
        samples.map(() => card.egress_bytes_per_s),
        samples.map(() => card.ingress_bytes_per_s),
      ] as uPlot.AlignedData,
    [samples, card.egress_bytes_per_s, card.ingress_bytes_per_s],
  );
  const at = (series: number) => (index: number) => quantity(data[series]?.[index] ?? null, "B/s");
  const series: readonly Series[] = [
    { label: "to devices", colour: "accent", thick: true, value: at(1) },
    { label: "from devices", colour: "soft", thick: true, value: at(2) },
    { label: "card, out", colour: "accent", dashed: true, unscaled: true, value: at(3) },
    { label: "card, in", colour: "soft", dashed: true, unscaled: true, value: at(4) },
  ];
  return (
    <section class="card" aria-labelledby="network">
      <div class="title">
        <h2 id="network">Network</h2>
        <p class="soft small end">{meanOf(rates.window_s)}</p>
      </div>
      <table class="plain">
        <thead>
          <tr>
            <th scope="col">server</th>
            <th scope="col">now</th>
            <th
              scope="col"
              title="The speed of the server's network card, as cleave serve --ps-gbit states it."
            >
              card
            </th>
            <th scope="col">used</th>
            <th scope="col">so far</th>
          </tr>
        </thead>
        <tbody>
          <Direction
            name="Sent"
            now={rates.egress_bytes_per_s}
            card={card.egress_bytes_per_s}
            total={totals.down_bytes}
          />
          <Direction
            name="Received"
            now={rates.ingress_bytes_per_s}
            card={card.ingress_bytes_per_s}
            total={totals.up_bytes}
          />
        </tbody>
      </table>
      {traffic.length > 0 && <Kinds traffic={traffic} />}
      <Chart
        title="Rates"
        summary={`To devices ${quantity(rates.egress_bytes_per_s, "B/s")}, from devices ${quantity(rates.ingress_bytes_per_s, "B/s")}.`}
        data={data}
        xText={timeOfDay}
        fromZero
        axisText={bytesPerS}
        series={series}
      />
    </section>
  );
}

function Kinds(props: { readonly traffic: Traffic }) {
  return (
    <table class="plain kinds">
      <thead>
        <tr>
          <th scope="col">what for</th>
          <th scope="col">to devices</th>
          <th scope="col">from devices</th>
        </tr>
      </thead>
      <tbody>
        {props.traffic.map(({ kind, down_bytes, up_bytes }) => (
          <tr key={kind}>
            <th scope="row">{kind}</th>
            <td>{down_bytes > 0 ? quantity(down_bytes, "B") : "–"}</td>
            <td>{up_bytes > 0 ? quantity(up_bytes, "B") : "–"}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function bytesPerS(value: number): string {
  return quantity(value, "B/s");
}

function Direction(props: {
  readonly name: string;
  readonly now: number | null;
  readonly card: number | null;
  readonly total: number | null;
}) {
  const used = share(props.now, props.card);
  return (
    <tr>
      <th scope="row">{props.name}</th>
      <td>{quantity(props.now, "B/s")}</td>
      <td>{props.card === null ? "not stated" : quantity(props.card, "B/s")}</td>
      <td>{percent(used)}</td>
      <td>{quantity(props.total, "B")}</td>
    </tr>
  );
}
