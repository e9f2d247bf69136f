/** What the browser tells of the device: battery, network, visibility, heat. */

import type { Surroundings } from "./conditions";

/** Parts of the browser that not all have, and that TypeScript does not know. */
interface Battery extends EventTarget {
  readonly level: number;
  readonly charging: boolean;
}

interface NetworkInformation extends EventTarget {
  readonly type?: string;
  readonly saveData?: boolean;
}

/** What the Compute Pressure API calls heat. Chromium knows only the processor's load. */
const THERMALS = "thermals";

interface PressureRecord {
  readonly source: string;
  readonly state: "nominal" | "fair" | "serious" | "critical";
}

interface PressureObserver {
  observe(source: string, options: { sampleInterval: number }): Promise<void>;
  disconnect(): void;
}

/** The browser's class of them. */
interface PressureObservers {
  readonly knownSources?: readonly string[];
  new (changed: (records: PressureRecord[]) => void): PressureObserver;
}

interface Extras {
  getBattery?: () => Promise<Battery>;
  connection?: NetworkInformation;
}

const EVERY_MS = 2000;

/** Watches the device, and tells when something changes. */
export class Sensors {
  #battery: Battery | null = null;
  #hot: boolean | null = null;
  readonly #network: NetworkInformation | null;
  readonly #pressures: PressureObservers | undefined;

  /** @param changed called after every change */
  constructor(private readonly changed: () => void) {
    const { PressureObserver } = globalThis as { PressureObserver?: PressureObservers };
    this.#pressures = PressureObserver;
    // Before it is watched a device that can tell counts as cool.
    if (PressureObserver?.knownSources?.includes(THERMALS)) this.#hot = false;
    const extras = navigator as Extras;
    // A desktop's browser has the object and tells nothing of the kind of network.
    this.#network = extras.connection?.type === undefined ? null : extras.connection;
    this.#network?.addEventListener("change", changed);
    document.addEventListener("visibilitychange", changed);
    extras.getBattery?.().then(
      (battery) => {
        this.#battery = battery;
        battery.addEventListener("levelchange", changed);
        battery.addEventListener("chargingchange", changed);
        changed();
      },
      () => undefined, // it will not tell
    );
  }

  /** As it is now. */
  get now(): Surroundings {
    const battery = this.#battery;
    const network = this.#network;
    return {
      battery: battery ? { level: battery.level, charging: battery.charging } : null,
      metered: network ? network.type === "cellular" || network.saveData === true : null,
      hidden: document.visibilityState === "hidden",
      hot: this.#hot,
    };
  }

  /** Watch the heat from now on, where the browser can; returns how to end that. */
  watchHeat(): () => void {
    const Observers = this.#pressures;
    if (!Observers || this.#hot === null) return () => undefined;
    const observer = new Observers((records) => records.forEach((record) => this.#felt(record)));
    observer.observe(THERMALS, { sampleInterval: EVERY_MS }).catch(() => {
      this.#hot = null; // not on this device after all
      this.changed();
    });
    return () => {
      observer.disconnect();
      if (this.#hot) this.#hot = false; // nobody looks any more
      this.changed();
    };
  }

  #felt({ source, state }: PressureRecord): void {
    if (source === THERMALS) this.#hot = state === "serious" || state === "critical";
    this.changed();
  }
}

/** Keeps the screen on while it is wanted, where the browser allows it. */
export class ScreenLock {
  #wanted = false;
  #lock: WakeLockSentinel | null = null;
  #settled = Promise.resolve();

  /** @param locks what the browser offers for it; null where it does not */
  constructor(
    private readonly page: Document,
    private readonly locks: WakeLock | null,
  ) {
    // The browser takes it away whenever the page is hidden.
    page.addEventListener("visibilitychange", () => this.#update());
  }

  set wanted(wanted: boolean) {
    if (wanted === this.#wanted) return;
    this.#wanted = wanted;
    this.#update();
  }

  /** One after the other: a lock may be granted when it is not wanted any more. */
  #update(): void {
    this.#settled = this.#settled.then(() => this.#settle());
  }

  async #settle(): Promise<void> {
    const held = this.#lock !== null && !this.#lock.released;
    const wanted = this.#wanted && this.page.visibilityState === "visible";
    if (this.locks === null || held === wanted) return;
    try {
      if (wanted) this.#lock = await this.locks.request("screen");
      else await this.#lock?.release();
    } catch {
      this.#lock = null; // a low battery, for one: the screen goes off as usual
    }
  }
}
