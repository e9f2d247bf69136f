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
import { DataMeter, readCap, Span } from "./data_use";
import { DeviceLink } from "./device";
import {
  forcedKernel,
  readInvitation,
  socketAddress,
  typedFragment,
  usedFragment,
} from "./invitation";
import { deviceName } from "./names";
import { askProject, shareOfToday, UNKNOWN } from "./project";
import { bytesPerSecond, flopsPerSecond, isIdle, type Sample, withSample } from "./rates";
import { type Contribution, Saved } from "./saved";
import { ScreenLock, Sensors } from "./sensors";
import { Choices, Fault, NoCode, Ready, Running } from "./views";

/** How often what it did is kept, the server told of the battery, and asked about the project. */
const KEEP_S = 5;
const TELL_S = 60;
const ASK_S = 30;

interface PageProps {
  readonly saved: Saved;
  readonly kernel: KernelName | null;
}

function Page({ saved, kernel }: PageProps) {
  const [invitation, setInvitation] = useState(() => readInvitation(location.hash));
  const [name, setName] = useState(() => deviceName(navigator.userAgent));
  const [conditions, setConditions] = useState<Conditions>(() => chosen(saved));
  const [status, setStatus] = useState<Status | null>(null);
  const [samples, setSamples] = useState<readonly Sample[]>([]);
  const [before, setBefore] = useState<Contribution>({ blocks: 0, flops: 0 });
  const [project, setProject] = useState(UNKNOWN);
  const [share, setShare] = useState("");
  const [refused, setRefused] = useState("");
  const [fault, setFault] = useState("");
  const [, setSensed] = useState(0);
  const sensors = useMemo(() => new Sensors(() => setSensed((n) => n + 1)), []);
  const meter = useMemo(() => new DataMeter(saved, () => new Date()), [saved]);
  const screen = useMemo(
    () => new ScreenLock(document, "wakeLock" in navigator ? navigator.wakeLock : null),
    [],
  );
  const link = useRef<DeviceLink | null>(null);
  const around = sensors.now;
  const used = meter.of(conditions.cap?.span ?? Span.DAY).bytes;
  const paused = mayNotWork(conditions, around, used, new Date());
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
  useEffect(() => (running ? sensors.watchPressure() : undefined), [running, sensors]);
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
  const today = meter.of(Span.DAY);
  const bytes_per_s = bytesPerSecond(samples);
  const working = status?.notice.state === State.WORKING;
  useEffect(() => {
    const ask = async () => {
      const told = await askProject();
      if (told === null) return;
      setProject(told);
      setShare(shareOfToday(meter.of(Span.DAY).flops, told, new Date()));
    };
    if (status === null) void ask();
    if (!working) return undefined; // there may be no server to ask
    const timer = setInterval(() => void ask(), ASK_S * 1000);
    return () => clearInterval(timer);
  }, [working]);
  const latest = useRef({ server, contribution, bytes_per_s });
  latest.current = { server, contribution, bytes_per_s: working ? bytes_per_s : null };
  useEffect(() => {
    if (!running) return undefined;
    const keep = () => {
      const { server, contribution, bytes_per_s } = latest.current;
      saved.keepContribution(server, contribution);
      meter.keep();
      if (bytes_per_s) saved.keepBytesPerSecond(server, bytes_per_s);
    };
    const timer = setInterval(() => {
      keep();
      setSensed((n) => n + 1); // another hour or day may have begun
    }, KEEP_S * 1000);
    addEventListener("pagehide", keep);
    return () => {
      clearInterval(timer);
      removeEventListener("pagehide", keep);
      keep();
    };
  }, [running, saved, meter]);

  const start = () => {
    const keys = saved.keys(invitation);
    if (!keys) return;
    saved.helping = location.hash;
    link.current?.close();
    setSamples([]);
    meter.begin();
    setBefore(saved.contribution(server));
    link.current = new DeviceLink(socketAddress(location), keys, name, kernel, paused, {
      status: (latest) => {
        setStatus(latest);
        meter.count(latest.counts, latest.notice.state === State.WORKING);
        if (latest.notice.state === State.ENDED) saved.helping = null;
        const sample = { at_s: performance.now() / 1000, counts: latest.counts };
        setSamples((samples) => withSample(samples, sample));
      },
      credential: (server, credential) => {
        // The code is used: it has no business in the address bar and the history any more.
        if (!saved.keep({ server, credential })) return;
        history.replaceState(null, "", location.pathname + location.search + usedFragment(server));
        if (saved.helping !== null) saved.helping = location.hash;
        setInvitation({ code: "", server });
      },
      failed: setFault,
    });
  };

  useEffect(() => {
    if (saved.helping === location.hash) start(); // the page was reloaded while it worked
  }, []);

  const choices = (
    <Choices
      conditions={conditions}
      offered={offered(around)}
      refused={refused}
      onRefused={setRefused}
      onChange={(chosen) => {
        setConditions(chosen);
        saved.keepChoices(chosen);
      }}
    />
  );
  const enter = (typed: string) => {
    const link = typed.trim();
    if (/^https?:\/\//.test(link))
      location.href = link; // it may lead to another server
    else location.hash = typedFragment(link);
    setInvitation(readInvitation(location.hash));
    setStatus(null);
  };
  if (fault) return <Fault text={fault} />;
  if (status) {
    return (
      <>
        <Running
          status={status}
          share={share}
          today={today}
          flops_per_s={flopsPerSecond(samples)}
          idle={isIdle(samples)}
          bytes_per_s={bytes_per_s}
          cap={conditions.cap ? { cap: conditions.cap, used } : null}
          contribution={contribution}
          load={sensors.load}
          hot={around.hot === true}
          stop={() => {
            saved.helping = null;
            link.current?.stop();
          }}
          again={start}
          enter={enter}
        />
        {running ? <section class="card">{choices}</section> : null}
      </>
    );
  }
  if (!saved.keys(invitation)) return <NoCode enter={enter} />;
  return (
    <Ready
      host={location.host}
      project={project}
      name={name}
      onName={setName}
      known={saved.device(invitation) !== null}
      secure={globalThis.isSecureContext}
      app={invitation.code && onAndroid(navigator.userAgent) ? appLink(location.href) : null}
      bytes_per_s={saved.lastBytesPerSecond(server)}
      cap={conditions.cap}
      start={start}
    >
      {choices}
    </Ready>
  );
}

/** The owner's choices of before; what was kept of a limit may be broken. */
function chosen(saved: Saved): Conditions {
  const choices = saved.choices(STANDARD);
  return { ...choices, cap: readCap(choices.cap) };
}

function page() {
  try {
    return (
      <Page
        saved={
          new Saved(
            allowedStorage(() => localStorage),
            allowedStorage(() => sessionStorage),
          )
        }
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
