/** The join page: from a link to a device that helps. */

import { render } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import "../ui/base.css";
import "./join.css";
import type { Status } from "../device/commands";
import { NOTHING, State, wait_s } from "../device/guest";
import type { KernelName } from "../kernels/kernel";
import { ErrorCode } from "../protocol/messages";
import { thisKind } from "../ui/kind";
import { allowedStorage } from "../ui/storage";
import { appLink, onAndroid } from "./app";
import { type Conditions, mayNotWork, standard } from "./conditions";
import { DataMeter, readCap, Span } from "./data_use";
import { DeviceLink } from "./device";
import {
  forcedKernel,
  readInvitation,
  socketAddress,
  typedFragment,
  usedFragment,
} from "./invitation";
import { runsGraphs } from "../graphs/browser";
import { chosenName, deviceMemoryBytes, deviceName, type Thing } from "./names";
import {
  askProject,
  isDead,
  otherHelpers,
  Outlook,
  outlook,
  shareOfToday,
  UNKNOWN,
} from "./project";
import {
  averageBytesPerSecond,
  bytesPerSecond,
  flopsPerSecond,
  helps,
  isTested,
  type Sample,
  withSample,
} from "./rates";
import { type Contribution, Saved } from "./saved";
import { ScreenLock, Sensors } from "./sensors";
import { Turn } from "./tabs";
import { Choices, Fault, NoCode, Ready, Running } from "./views";
import { deadKey, NO_WORK, type Said } from "./words";

/** How often what it did is kept, and the server told of the battery. */
const KEEP_S = 5;
const TELL_S = 60;

/** How often the server is asked about the project, while it gives work and while it does not. */
const ASK_S = 30;
const ASK_IDLE_S = 10;

/** A page that cannot load the device, and tries again. */
interface Retry {
  readonly failures: number;
  readonly at_ms: number;
}

interface PageProps {
  readonly saved: Saved;
  readonly kernel: KernelName | null;
}

function Page({ saved, kernel }: PageProps) {
  const thing: Thing = thisKind() || "computer";
  const [invitation, setInvitation] = useState(() => readInvitation(location.hash));
  const [name, setName] = useState(() => deviceName(navigator.userAgent));
  const [conditions, setConditions] = useState<Conditions>(() => chosen(saved, thing));
  const [status, setStatus] = useState<Status | null>(null);
  const [samples, setSamples] = useState<readonly Sample[]>([]);
  const [before, setBefore] = useState<Contribution>({ blocks: 0, flops: 0, seconds: 0 });
  const [project, setProject] = useState(UNKNOWN);
  const [share, setShare] = useState("");
  const [forgotten, setForgotten] = useState(false);
  const [asked, setAsked] = useState<string | null>(null); // about which keys the server was asked
  const [retry, setRetry] = useState<Retry | null>(null);
  const [online, setOnline] = useState(navigator.onLine);
  const [alone, setAlone] = useState(false); // whether another tab took over, and has ended
  const [fault, setFault] = useState("");
  const [, setSensed] = useState(0);
  const again = () => setSensed((n) => n + 1);
  const sensors = useMemo(() => new Sensors(again), []);
  const meter = useMemo(() => new DataMeter(saved, () => new Date()), [saved]);
  const screen = useMemo(
    () => new ScreenLock(document, "wakeLock" in navigator ? navigator.wakeLock : null),
    [],
  );
  const turn = useMemo(() => new Turn("locks" in navigator ? navigator.locks : null), []);
  const link = useRef<DeviceLink | null>(null);
  const canRunGraphs = useMemo(() => runsGraphs(deviceMemoryBytes()), []);
  const around = sensors.now;
  const used = meter.of(conditions.cap?.span ?? Span.DAY).bytes;
  const prospect = outlook(project, canRunGraphs);
  const paused =
    mayNotWork(conditions, around, used, new Date()) ??
    (prospect === Outlook.NEVER ? NO_WORK : null);
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
  useEffect(() => {
    const changed = () => {
      setOnline(navigator.onLine);
      link.current?.network(navigator.onLine);
      if (navigator.onLine) setRetry((retry) => retry && { ...retry, at_ms: 0 });
    };
    for (const name of ["online", "offline"]) addEventListener(name, changed);
    return () => {
      for (const name of ["online", "offline"]) removeEventListener(name, changed);
    };
  }, []);
  useEffect(() => link.current?.allow(paused), [paused]);
  useEffect(() => {
    screen.wanted = running && paused === null && prospect === Outlook.WORK;
  }, [running, paused, prospect, screen]);
  useEffect(() => (running ? sensors.watchHeat() : undefined), [running, sensors]);
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
  const title = project === UNKNOWN ? saved.title(server) : project.title;
  const contribution = {
    blocks: before.blocks + (status?.counts.blocks ?? 0),
    flops: before.flops + (status?.counts.flops ?? 0),
    seconds: before.seconds + meter.visit_s,
  };
  const today = meter.of(Span.DAY);
  const average_bytes_per_s = averageBytesPerSecond(samples);
  const working = status?.notice.state === State.WORKING;
  const helping = working && helps(samples);
  const code = status?.notice.code ?? null;
  const ended = status?.notice.state === State.ENDED;
  const idle = status?.notice.state === State.PAUSED && paused === NO_WORK;
  const keys = Object.values(saved.keys(invitation) ?? {}).filter((key) => key !== "");
  useEffect(() => {
    let over = false;
    const ask = async () => {
      const { flops } = meter.of(Span.DAY);
      const told = await askProject(keys);
      if (over) return; // a later question has a newer answer
      if (told !== null) {
        setProject(told);
        setShare(shareOfToday(flops, told, new Date())); // both numbers are of the same moment
        if (server) saved.keepTitle(server, told.title);
      }
      setAsked(keys.join());
      // A dead key stays dead, and the server counts each question about it as a failed attempt.
      if (told !== null && isDead(told.key)) clearInterval(timer);
    };
    // While it is not connected there may be no server to ask.
    if (status === null || working || ended || idle) void ask();
    const asks = working || idle || status === null; // before the start, the link may expire
    const every_s = helping ? ASK_S : ASK_IDLE_S;
    const timer = asks ? setInterval(() => void ask(), 1000 * every_s) : undefined;
    return () => {
      over = true;
      clearInterval(timer);
    };
  }, [working, helping, ended, idle, status === null, keys.join()]);
  useEffect(() => {
    document.title = `Lend this ${thing}${title ? ` to ${title}` : ""}`;
  }, [title]);
  useEffect(() => {
    if (code !== ErrorCode.DUPLICATE) return undefined;
    turn.end();
    return turn.await(`cleave ${server}`, () => setAlone(true));
  }, [code, server, turn]);
  const latest = useRef({ server, contribution, bytes_per_s: average_bytes_per_s });
  latest.current = {
    server,
    contribution,
    bytes_per_s: helping ? average_bytes_per_s : null,
  };
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
      again(); // another hour or day may have begun
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
    setAlone(false);
    meter.begin();
    setBefore(saved.contribution(server));
    turn.take(`cleave ${server}`);
    let recent: readonly Sample[] = [];
    const called = chosenName(name, navigator.userAgent);
    link.current = new DeviceLink(socketAddress(location), keys, called, kernel, paused, {
      status: (latest) => {
        setRetry(null);
        setStatus(latest);
        const { counts, busy, notice } = latest;
        const earlier = notice.state === State.WORKING ? recent : []; // averages are of its work
        recent = withSample(earlier, { at_s: performance.now() / 1000, counts, busy });
        setSamples(recent);
        meter.count(counts, notice.state === State.WORKING && helps(recent));
        if (notice.state === State.ENDED) {
          saved.helping = null;
          turn.end();
        }
      },
      credential: (server, credential) => {
        // The code is used: it has no business in the address bar and the history any more.
        if (!saved.keep({ server, credential })) return;
        history.replaceState(null, "", location.pathname + location.search + usedFragment(server));
        if (saved.helping !== null) saved.helping = location.hash;
        setInvitation({ code: "", server, app: false });
      },
      failed: (reason) => void failed(reason),
    });
  };
  /** The device's worker failed: without a server it could not be loaded, which passes. */
  const failed = async (reason: string) => {
    turn.end();
    link.current?.close();
    link.current = null;
    setStatus(null);
    if ((await askProject([])) !== null) {
      setFault(reason);
      return;
    }
    setRetry((retry) => {
      const failures = (retry?.failures ?? 0) + 1;
      return { failures, at_ms: Date.now() + 1000 * wait_s(failures, Math.random()) };
    });
  };
  const starting = useRef(start);
  starting.current = start;
  useEffect(() => {
    if (retry === null) return undefined;
    const tick = () => {
      if (Date.now() < retry.at_ms) again();
      else if (link.current === null) starting.current();
    };
    const timer = setInterval(tick, 500);
    return () => clearInterval(timer);
  }, [retry]);

  const knows = asked !== null;
  useEffect(() => {
    // The page was reloaded while it worked. It knows now whether there is work for it.
    if (knows && saved.helping === location.hash) start();
  }, [knows]);

  const enter = (typed: string) => {
    const link = typed.trim();
    if (/^https?:\/\//.test(link))
      location.href = link; // it may lead to another server
    else location.hash = typedFragment(link);
    setInvitation(readInvitation(location.hash));
    setStatus(null);
  };
  const choices = (
    <Choices
      conditions={conditions}
      around={around}
      thing={thing}
      onChange={(chosen) => {
        setConditions(chosen);
        saved.keepChoices(chosen);
      }}
    />
  );
  const tryAgain = () => {
    setFault("");
    start();
  };
  const seen = status ?? (retry && unreachable(retry));
  const view = [fault !== "", seen !== null, ended, keys.length === 0, asked !== null].join();
  const shown = useRef(view);
  useEffect(() => {
    if (shown.current === view) return;
    const first = shown.current.endsWith("false"); // nothing was shown before
    shown.current = view;
    const heading = document.querySelector("h1");
    if (first || heading === null || document.activeElement !== document.body) return;
    heading.tabIndex = -1;
    heading.focus(); // the button that had the focus is gone, and with it the keyboard's place
  }, [view]);
  if (fault) return <Fault text={fault} again={tryAgain} />;
  if (seen) {
    return (
      <Running
        status={seen}
        now={{
          title,
          host: location.host,
          thing,
          online,
          helps: helping,
          tested: isTested(samples),
          helped: today.seconds > 0,
          training: project.training.state,
          outlook: prospect,
          others: otherHelpers(project),
          key: project.key,
          reason: project.reason,
          alone,
        }}
        share={share}
        today={today}
        flops_per_s={flopsPerSecond(samples)}
        bytes_per_s={bytesPerSecond(samples)}
        average_bytes_per_s={average_bytes_per_s}
        cap={conditions.cap ? { cap: conditions.cap, used } : null}
        contribution={contribution}
        hot={around.hot === true}
        stop={() => {
          saved.helping = null;
          if (link.current) link.current.stop();
          setRetry(null);
        }}
        again={start}
        settings={() => setStatus(null)}
        retry={() => {
          if (link.current) link.current.network(true);
          else start();
        }}
        enter={enter}
      >
        {choices}
      </Running>
    );
  }
  if (keys.length === 0) {
    return <NoCode enter={enter} dead={forgotten ? forgottenText(thing, title) : null} />;
  }
  if (asked !== keys.join()) return null; // an answer comes at once, and decides what is shown
  if (isDead(project.key)) {
    return <NoCode enter={enter} dead={deadKey(project.key, title, thing, project.reason)} />;
  }
  return (
    <Ready
      host={location.host}
      project={project}
      thing={thing}
      name={name}
      onName={setName}
      known={saved.device(invitation) !== null}
      contribution={saved.contribution(server)}
      secure={globalThis.isSecureContext}
      keepsScreen={"wakeLock" in navigator}
      around={around}
      conditions={conditions}
      app={
        invitation.app && invitation.code && onAndroid(navigator.userAgent)
          ? appLink(location.href)
          : null
      }
      bytes_per_s={saved.lastBytesPerSecond(server)}
      used={used}
      start={start}
      outlook={prospect}
      forget={() => {
        saved.forget(server);
        history.replaceState(null, "", location.pathname);
        setConditions(chosen(saved, thing));
        setForgotten(true);
        setInvitation(readInvitation(""));
      }}
    >
      {choices}
    </Ready>
  );
}

/** What is shown after the owner has let the page forget the device. */
function forgottenText(thing: Thing, title: string): Said {
  return {
    headline: `This ${thing} is forgotten`,
    detail: `To help again, it needs a new link from ${title || "the sender"}.`,
  };
}

/** What is shown of a device that could not be loaded. */
function unreachable({ at_ms }: Retry): Status {
  const retry_s = Math.max(0, (at_ms - Date.now()) / 1000);
  const notice = { state: State.WAITING, reason: "", code: null, retry_s, lost: true };
  return { notice, counts: NOTHING, busy: false, device: null, kernel: null, unused: [] };
}

/** The owner's choices of before; what was kept of a limit may be broken. */
function chosen(saved: Saved, thing: Thing): Conditions {
  const choices = saved.choices(standard(thing !== "computer"));
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
    return <Fault text={error instanceof Error ? error.message : String(error)} again={null} />;
  }
}

const root = document.getElementById("join");
if (root) {
  root.replaceChildren();
  render(page(), root);
}
