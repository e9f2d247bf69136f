/** One device: now against its profile, and when it received, computed and sent. */

import { useCallback } from "preact/hooks";
import { count, quantity } from "../../ui/figures";
import { concern, kindOf, nameOf, share } from "../fleet";
import type { Device, Timeline } from "../overview";
import { energyOf, percent, seconds } from "../text";
import { busyShare, extent } from "../timeline";
import { Canvas, type Draw } from "./Canvas";
import { drawTimeline } from "./drawTimeline";

interface Props {
  readonly device: Device;
  readonly timeline: Timeline | null;
  readonly close: () => void;
}

export function DeviceDetail({ device, timeline, close }: Props) {
  return (
    <aside class="detail" aria-labelledby="chosen">
      <div class="title">
        <h3 id="chosen">{nameOf(device)}</h3>
        <p class={`chip ${concern(device.state)}`}>{device.state}</p>
        <button
          type="button"
          class="quiet end"
          onClick={close}
          aria-label={`Close ${nameOf(device)}`}
        >
          close
        </button>
      </div>
      <p class="soft small">
        {kindOf(device)}, session {device.device}
        {device.identity !== "" && `, known as ${device.identity}`}
        {device.own && ", your own: it may train whole layers"}
        {device.reputation !== null && `, reputation ${device.reputation}`}
      </p>
      {device.reason !== "" && <p class="small">{device.reason}</p>}
      <table class="plain">
        <thead>
          <tr>
            <th scope="col">rate</th>
            <th scope="col">now</th>
            <th scope="col">profile</th>
            <th scope="col">share</th>
          </tr>
        </thead>
        <tbody>
          <Rate
            name="Compute"
            unit="FLOP/s"
            now={device.flops_per_s}
            stated={device.profile_flops_per_s}
          />
          <Rate
            name="Downlink"
            unit="B/s"
            now={device.downlink_bytes_per_s}
            stated={device.profile_downlink_bytes_per_s}
          />
          <Rate
            name="Uplink"
            unit="B/s"
            now={device.uplink_bytes_per_s}
            stated={device.profile_uplink_bytes_per_s}
          />
        </tbody>
      </table>
      <p class="small soft">
        {device.blocks === null ? "–" : count(device.blocks)} blocks in {seconds(device.compute_s)}{" "}
        of computing · {quantity(device.down_bytes, "B")} down, {quantity(device.up_bytes, "B")} up
        · round trip {seconds(device.round_trip_s)} · {energyOf(device)}
      </p>
      <h4>Its last blocks</h4>
      {timeline === null || timeline.spans.length === 0 ? (
        <p class="soft small empty">
          {timeline === null ? "Asking the server." : "No block of it is back yet."}
        </p>
      ) : (
        <Spans timeline={timeline} />
      )}
    </aside>
  );
}

function Spans(props: { readonly timeline: Timeline }) {
  const { timeline } = props;
  const draw = useCallback<Draw>(
    (context, size, theme) => drawTimeline(context, size, theme, timeline.spans),
    [timeline],
  );
  const range = extent(timeline.spans);
  const shares = busyShare(timeline.spans);
  const summary =
    `Over ${seconds(range.end_s - range.start_s)}: receiving ${percent(shares.receive)}, ` +
    `computing ${percent(shares.compute)}, sending ${percent(shares.send)} of the time.`;
  return (
    <>
      <Canvas class="timeline" summary={`Timeline. ${summary}`} draw={draw} />
      <p class="small soft">{summary}</p>
    </>
  );
}

function Rate(props: {
  readonly name: string;
  readonly unit: string;
  readonly now: number | null;
  readonly stated: number | null;
}) {
  return (
    <tr>
      <th scope="row">{props.name}</th>
      <td>{quantity(props.now, props.unit)}</td>
      <td>{quantity(props.stated, props.unit)}</td>
      <td>{percent(share(props.now, props.stated))}</td>
    </tr>
  );
}
