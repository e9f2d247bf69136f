/** What every device did in the last seconds: the way of a step. */

import { useCallback, useMemo } from "preact/hooks";
import { count } from "../../ui/figures";
import { nameOf } from "../fleet";
import type { Device, Stream } from "../overview";
import { percent, seconds } from "../text";
import { busyWithin } from "../timeline";
import { Canvas, type Draw, type Size } from "./Canvas";
import { drawStream, heightOf, spanAt } from "./drawStream";

const DOES = { receive: "receives", compute: "computes", send: "sends" } as const;

export function StreamView(props: {
  readonly stream: Stream;
  readonly devices: readonly Device[];
}) {
  const { stream, devices } = props;
  const names = useMemo(
    () => new Map(devices.map((device) => [device.device, nameOf(device)])),
    [devices],
  );
  const name = useCallback((device: number) => names.get(device) ?? `device ${device}`, [names]);
  const draw = useCallback<Draw>(
    (context, size, theme) => drawStream(context, size, theme, stream, name),
    [stream, name],
  );
  const tell = useCallback(
    (x: number, y: number, size: Size) => {
      const found = spanAt(x, y, size, stream, name);
      if (found === null) return "";
      const { device, span } = found;
      const took = seconds(span.end_s - span.start_s);
      return `${name(device)} ${DOES[span.lane]} for ${took}, from ${seconds(-span.start_s)} ago`;
    },
    [stream, name],
  );
  return (
    <section class="card wide" aria-labelledby="stream">
      <div class="title">
        <h2 id="stream">What devices do</h2>
        <p class="soft small end">
          the last {seconds(stream.window_s)}, as the server can tell
          {stream.hidden > 0 && `; ${count(stream.hidden)} more devices are not shown`}
        </p>
      </div>
      <Canvas
        class="stream"
        summary={`What devices do. ${summaryOf(stream)}`}
        height={heightOf(stream)}
        draw={draw}
        tell={tell}
      />
    </section>
  );
}

/** How busy devices were on average, in a sentence. */
export function summaryOf(stream: Stream): string {
  const shares = stream.devices.map(({ spans }) => busyWithin(spans, -stream.window_s, 0));
  const mean = (lane: keyof typeof DOES) =>
    shares.reduce((sum, share) => sum + share[lane], 0) / Math.max(1, shares.length);
  return (
    `In the last ${seconds(stream.window_s)} a device received ${percent(mean("receive"))}, ` +
    `computed ${percent(mean("compute"))} and sent ${percent(mean("send"))} of the time.`
  );
}
