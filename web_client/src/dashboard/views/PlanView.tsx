/** The GEMM that has been running longest, drawn as the tiling that its plan is. */

import { useCallback, useMemo } from "preact/hooks";
import type uPlot from "uplot";
import { count } from "../../ui/figures";
import { nameOf, share } from "../fleet";
import type { Device, FinishedGemm, Plan } from "../overview";
import { counted, percent, seconds } from "../text";
import { layOut, progress } from "../tiling";
import { Canvas, type Draw, type Size } from "./Canvas";
import { Chart } from "./Chart";
import { drawTiling, tileAt } from "./drawTiling";
import { Figure } from "./Figure";

interface Props {
  readonly plan: Plan | null;
  readonly gemms: readonly FinishedGemm[];
  readonly devices: readonly Device[];
  readonly chosen: number;
}

export function PlanView({ plan, gemms, devices, chosen }: Props) {
  return (
    <section class="card" aria-labelledby="plan">
      <div class="title">
        <h2 id="plan">Plan</h2>
        {plan !== null && <p class="soft">{plan.name}</p>}
      </div>
      {plan === null ? (
        <p class="soft empty">No multiplication is under way.</p>
      ) : (
        <Running plan={plan} devices={devices} chosen={chosen} />
      )}
      {gemms.length > 1 && <Promises gemms={gemms} />}
    </section>
  );
}

function Running(props: {
  readonly plan: Plan;
  readonly devices: readonly Device[];
  readonly chosen: number;
}) {
  const { plan, devices, chosen } = props;
  const tiling = useMemo(() => layOut(plan), [plan]);
  const draw = useCallback<Draw>(
    (context, size, theme) => drawTiling(context, size, theme, tiling, chosen),
    [tiling, chosen],
  );
  const { blocks, done } = progress(plan);
  const workers = new Set(plan.tiles.map((tile) => tile.device)).size;
  const summary =
    `${plan.name}, ${plan.m} by ${plan.n}, depth ${plan.k}: ${counted(plan.tiles.length, "tile")} on ` +
    `${counted(workers, "device")}, ${counted(tiling.slabs, "slab")} in depth, ` +
    `${done} of ${blocks} blocks back.`;
  const tell = (x: number, y: number, size: Size) => {
    const tile = tileAt(tiling, size, x, y)?.tile;
    if (tile === undefined) return "";
    const device = devices.find((each) => each.device === tile.device);
    const name = device === undefined ? `device ${tile.device}` : nameOf(device);
    return `${name}: ${tile.done} of ${counted(tile.blocks, "block")} back`;
  };
  return (
    <>
      <p class="small soft">
        {count(plan.m)} × {count(plan.n)}, depth {count(plan.k)} ·{" "}
        {counted(plan.tiles.length, "tile")} on {counted(workers, "device")} ·{" "}
        {counted(tiling.slabs, "slab")} in depth
      </p>
      <Canvas class="tiling" summary={summary} draw={draw} tell={tell} />
      <dl class="figures">
        <Figure name="Blocks back" value={`${count(done)} of ${count(blocks)}`} />
        <Figure name="Predicted" value={seconds(plan.predicted_s)} />
        <Figure
          name="Running for"
          value={seconds(plan.elapsed_s)}
          note={`${percent(share(plan.elapsed_s, plan.predicted_s))} of predicted`}
        />
      </dl>
    </>
  );
}

/** Predicted against actual, of the GEMMs that finished while the page was open. */
function Promises(props: { readonly gemms: readonly FinishedGemm[] }) {
  const { gemms } = props;
  const ratios = gemms.map((gemm) => gemm.took_s / gemm.predicted_s);
  const data = useMemo(
    () => [
      gemms.map((_, i) => i + 1),
      gemms.map((gemm) => gemm.took_s / gemm.predicted_s),
      gemms.map(() => 1),
    ],
    [gemms],
  ) as uPlot.AlignedData;
  const median = [...ratios].sort((a, b) => a - b)[ratios.length >> 1] ?? 1;
  return (
    <Chart
      title="Time taken, of predicted"
      summary={`Median ${percent(median)} of ${gemms.length} multiplications.`}
      data={data}
      fromZero
      axisText={percent}
      series={[
        {
          label: "GEMM",
          colour: "accent",
          points: true,
          value: (i) => `${gemms[i]?.name ?? ""} ${percent(ratios[i] ?? null)}`,
        },
        { label: "as predicted", colour: "soft", dashed: true, value: () => "" },
      ]}
    />
  );
}
