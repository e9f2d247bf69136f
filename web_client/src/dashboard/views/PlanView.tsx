/** The GEMM that has been running longest, drawn as the tiling that its plan is. */

import { useCallback, useMemo } from "preact/hooks";
import { count } from "../../ui/figures";
import { nameOf, share } from "../fleet";
import type { Device, Plan } from "../overview";
import { counted, percent, seconds } from "../text";
import { layOut, progress } from "../tiling";
import { Canvas, type Draw, type Size } from "./Canvas";
import { drawTiling, tileAt } from "./drawTiling";
import { Figure } from "./Figure";

interface Props {
  readonly plan: Plan | null;
  readonly devices: readonly Device[];
  readonly chosen: number;
  /** Nothing goes on: how long it has been running says nothing. */
  readonly waits: boolean;
}

export function PlanView({ plan, devices, chosen, waits }: Props) {
  return (
    <section class="card" aria-labelledby="plan">
      <div class="title">
        <h2
          id="plan"
          title="The matrix product that devices compute now. Each box is the part of one device."
        >
          Plan
        </h2>
        {plan !== null && <p class="soft">{plan.name}</p>}
      </div>
      {plan === null ? (
        <p class="soft empty">No multiplication is under way.</p>
      ) : (
        <Running plan={plan} devices={devices} chosen={chosen} waits={waits} />
      )}
    </section>
  );
}

function Running(props: {
  readonly plan: Plan;
  readonly devices: readonly Device[];
  readonly chosen: number;
  readonly waits: boolean;
}) {
  const { plan, devices, chosen, waits } = props;
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
        {counted(plan.tiles.length, "tile")} on {counted(workers, "device")}
        {tiling.slabs > 1 && ` · depth cut into ${counted(tiling.slabs, "slab")}`}
      </p>
      <Canvas class="tiling" summary={summary} draw={draw} tell={tell} />
      <dl class="figures">
        <Figure name="Blocks back" value={`${count(done)} of ${count(blocks)}`} />
        <Figure name="Predicted" value={seconds(plan.predicted_s)} />
        <Figure
          name="Running for"
          value={waits ? "–" : seconds(plan.elapsed_s)}
          note={
            waits ? "waiting" : `${percent(share(plan.elapsed_s, plan.predicted_s))} of predicted`
          }
        />
      </dl>
    </>
  );
}
