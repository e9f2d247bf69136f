/** The worker that is the device: it holds the connection, so that the page never stalls it. */

import { runsGraphs, startGraphWorker } from "../graphs/browser";
import { GraphThread } from "../graphs/graph_thread";
import { surroundings } from "../kernels/browser";
import { type Chosen, chooseKernel } from "../kernels/choose";
import { DType, KernelName } from "../kernels/kernel";
import { cleanText } from "../protocol/codec";
import { VERSION } from "../protocol/limits";
import { Feature, make, type MessageOf, Op, Role } from "../protocol/messages";
import { realClock } from "./clock";
import type { Command, Report, Status } from "./commands";
import { Guest, type Notice, State } from "./guest";
import { healthProbe } from "./health";
import { Session } from "./session";

/** How often the page is told how things are. */
const REPORT_S = 0.5;

type Start = Extract<Command, { kind: "start" }>;

/** One device, from its start to its end. */
class Device {
  readonly #start: Start;
  readonly #guest: Guest;
  readonly #unused: { name: KernelName; reason: string }[] = [];
  readonly #lost = new Set<KernelName>();
  #keys: { credential: string; join_code: string };
  #chosen: Chosen | null = null;
  #session: Session | null = null;
  #number: string | null = null;

  constructor(start: Start) {
    this.#start = start;
    this.#keys = { credential: start.credential, join_code: start.join_code };
    const say = ({ state }: Notice) => {
      // Its owner has the memory back.
      if (state === State.PAUSED || state === State.ENDED) this.#session?.forget();
      this.report();
    };
    this.#guest = new Guest(() => this.#connect(), say, realClock, Math.random);
    if (start.paused !== null) this.#guest.pause(start.paused);
  }

  async run(): Promise<void> {
    const tick = () => {
      this.report();
      stop = realClock.after(REPORT_S, tick);
    };
    let stop = realClock.after(REPORT_S, tick);
    await this.#guest.run();
    stop();
    this.#chosen?.kernel.close();
    this.#session = null;
    this.report();
  }

  obey(command: Exclude<Command, Start>): void {
    if (command.kind === "pause") this.#guest.pause(command.reason);
    else if (command.kind === "resume") this.#guest.resume();
    else if (command.kind === "stop") this.#guest.stop();
    else if (command.kind === "network") {
      if (command.online) this.#guest.online();
      else this.#guest.offline();
    } else this.#session?.tell({ ...command.values });
  }

  report(): void {
    const kernel = this.#chosen?.kernel;
    const status: Status = {
      notice: this.#notice(),
      counts: this.#guest.counts,
      busy: this.#session?.core.busy === true,
      device: this.#number,
      kernel: kernel ? { name: kernel.name, about: kernel.about } : null,
      unused: this.#unused,
    };
    say({ kind: "status", status });
  }

  #notice(): Notice {
    const { notice } = this.#guest;
    const starting = notice.state === State.CONNECTING && !this.#chosen;
    return starting ? { ...notice, state: State.STARTING } : notice;
  }

  async #connect(): Promise<Session> {
    const { kernel, flops_per_s } = await this.#kernel();
    const { memory_bytes, threads } = this.#start;
    // Where the GPU multiplies faster than the processor, it computes layers faster, too.
    const build = kernel.name === KernelName.WEBGPU ? "gpu" : "processor";
    const graphs = runsGraphs(memory_bytes);
    const hello = make("hello", {
      role: Role.DEVICE,
      version: VERSION,
      ...this.#keys,
      name: cleanText(this.#start.name),
      ops: [Op.MATMUL],
      dtypes: Object.values(DType),
      memory_bytes,
      flops_per_s,
      kind: this.#start.device_kind,
      versions: [VERSION],
      features: graphs ? [Feature.GRAPHS, Feature.CODING, Feature.KEEPS] : [Feature.CODING],
    });
    const socket = new WebSocket(this.#start.address);
    const ask = (url: string, options: RequestInit) => fetch(url, options);
    const probe = healthProbe(location.href, ask, realClock);
    const welcomed = (welcome: MessageOf<"welcome">) => {
      this.#number = welcome.device.toString();
      if (welcome.credential) {
        this.#keys = { credential: welcome.credential, join_code: "" };
        say({ kind: "credential", server: welcome.server, credential: welcome.credential });
      }
      this.#guest.welcomed();
    };
    const kept = this.#session?.take();
    const runner = graphs
      ? (kept?.graphs ?? new GraphThread(() => startGraphWorker(build, threads)))
      : null;
    const held = kept?.arrays ?? null;
    this.#session = new Session(socket, kernel, hello, realClock, probe, welcomed, runner, held);
    return this.#session;
  }

  async #kernel(): Promise<Chosen> {
    if (this.#chosen) return this.#chosen;
    this.report();
    const all = this.#start.kernel ? [this.#start.kernel] : Object.values(KernelName);
    const names = all.filter((name) => !this.#lost.has(name));
    const { memory_bytes, threads } = this.#start;
    const around = surroundings(memory_bytes, threads, this.#start.kernel !== null);
    const chosen = await chooseKernel(names, around, (name, reason) =>
      this.#unused.push({ name, reason }),
    );
    this.#chosen = chosen;
    chosen.kernel.lost.then((reason) => {
      this.#unused.push({ name: chosen.kernel.name, reason });
      this.#lost.add(chosen.kernel.name);
      chosen.kernel.close();
      this.#chosen = null;
    });
    return chosen;
  }
}

function say(report: Report): void {
  postMessage(report);
}

let device: Device | null = null;

addEventListener("message", ({ data: command }: MessageEvent<Command>) => {
  if (command.kind === "start") {
    device = new Device(command);
    void device.run();
  } else {
    device?.obey(command);
  }
});
