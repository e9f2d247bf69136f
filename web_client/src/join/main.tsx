/** The join page: from a code to a device that helps. */

import { render } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import "../ui/base.css";
import "./join.css";
import type { Status } from "../device/commands";
import { State } from "../device/guest";
import type { KernelName } from "../kernels/kernel";
import { allowedStorage } from "../ui/storage";
import { appLink, onAndroid } from "./app";
import { type Conditions, mayNotWork, offered, STANDARD } from "./conditions";
import { DeviceLink } from "./device";
import { forcedKernel, readInvitation, socketAddress, usedFragment } from "./invitation";
import { deviceName } from "./names";
import { flopsPerSecond, type Sample, withSample } from "./rates";
import { type Contribution, Saved } from "./saved";
import { type Heat, ScreenLock, Sensors } from "./sensors";
import { Choices, Fault, NoCode, Ready, Running } from "./views";

/** How often the contribution is written down, and the server told of the battery. */
const KEEP_S = 5;
const TELL_S = 60;

interface PageProps {
  readonly saved: Saved;
  readonly kernel: KernelName | null;
}

function Page({ saved, kernel }: PageProps) {
  const [invitation, setInvitation] = useState(() => readInvitation(location.hash));
  const [name, setName] = useState(() => deviceName(navigator.userAgent));
  const [conditions, setConditions] = useState<Conditions>(() => saved.choices(STANDARD));
  const [status, setStatus] = useState<Status | null>(null);
  const [samples, setSamples] = useState<readonly Sample[]>([]);
  const [before, setBefore] = useState<Contribution>({ blocks: 0, flops: 0 });
  const [fault, setFault] = useState("");
  const [heat, setHeat] = useState<Heat>(null);
  const [, setSensed] = useState(0);
  const sensors = useMemo(() => new Sensors(() => setSensed((n) => n + 1)), []);
  const screen = useMemo(
    () => new ScreenLock(document, "wakeLock" in navigator ? navigator.wakeLock : null),
    [],
  );
  const link = useRef<DeviceLink | null>(null);
  const around = sensors.now;
  const paused = mayNotWork(conditions, around);
  const running = status !== null && status.notice.state !== State.ENDED;

  useEffect(() => {
    const changed = () => {
      setInvitation(readInvitation(location.hash));
      // Another code was pasted after the one before was refused.
      setStatus((status) => (status?.notice.state === State.ENDED ? null : status));
    };
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  useEffect(() => link.current?.allow(paused), [paused]);
  useEffect(() => {
    screen.wanted = running && paused === null;
  }, [running, paused, screen]);
  useEffect(() => (running ? sensors.watchHeat(setHeat) : undefined), [running, sensors]);
  useEffect(() => {
    if (!running) return undefined;
    const tell = () => {
      const battery = sensors.now.battery;
      if (battery) link.current?.telemetry({ battery_ratio: battery.level });
    };
    const timer = setInterval(tell, TELL_S * 1000);
    return () => clearInterval(timer);
  }, [running, sensors]);

  const server = invitation.server || saved.device(invitation)?.server || "";
  const contribution = {
    blocks: before.blocks + (status?.counts.blocks ?? 0),
    flops: before.flops + (status?.counts.flops ?? 0),
  };
  const latest = useRef({ server, contribution });
  latest.current = { server, contribution };
  useEffect(() => {
    if (!running) return undefined;
    const keep = () => saved.keepContribution(latest.current.server, latest.current.contribution);
    const timer = setInterval(keep, KEEP_S * 1000);
    addEventListener("pagehide", keep);
    return () => {
      clearInterval(timer);
      removeEventListener("pagehide", keep);
      keep();
    };
  }, [running, saved]);

  const start = () => {
    const keys = saved.keys(invitation);
    if (!keys) return;
    link.current?.close();
    setSamples([]);
    setBefore(saved.contribution(server));
    link.current = new DeviceLink(socketAddress(location), keys, name, kernel, paused, {
      status: (latest) => {
        setStatus(latest);
        const sample = { at_s: performance.now() / 1000, counts: latest.counts };
        setSamples((samples) => withSample(samples, sample));
      },
      credential: (server, credential) => {
        // The code is used: it has no business in the address bar and the history any more.
        if (!saved.keep({ server, credential })) return;
        history.replaceState(null, "", location.pathname + location.search + usedFragment(server));
        setInvitation({ code: "", server });
      },
      failed: setFault,
    });
  };

  const choices = (
    <Choices
      conditions={conditions}
      offered={offered(around)}
      onChange={(chosen) => {
        setConditions(chosen);
        saved.keepChoices(chosen);
      }}
    />
  );
  if (fault) return <Fault text={fault} />;
  if (status) {
    return (
      <>
        <Running
          status={status}
          flops_per_s={flopsPerSecond(samples)}
          contribution={contribution}
          heat={heat}
          stop={() => link.current?.stop()}
          again={start}
        />
        {running ? <section class="card">{choices}</section> : null}
      </>
    );
  }
  if (!saved.keys(invitation)) return <NoCode />;
  return (
    <Ready
      host={location.host}
      name={name}
      onName={setName}
      known={saved.device(invitation) !== null}
      secure={globalThis.isSecureContext}
      app={invitation.code && onAndroid(navigator.userAgent) ? appLink(location.href) : null}
      start={start}
    >
      {choices}
    </Ready>
  );
}

function page() {
  try {
    return (
      <Page
        saved={new Saved(allowedStorage(() => localStorage))}
        kernel={forcedKernel(location.search)}
      />
    );
  } catch (error) {
    return <Fault text={error instanceof Error ? error.message : String(error)} />;
  }
}

const root = document.getElementById("join");
if (root) {
  root.replaceChildren();
  render(page(), root);
}
