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

interface PressureRecord {
  readonly state: "nominal" | "fair" | "serious" | "critical";
}

interface PressureObserver {
  observe(source: "cpu", options: { sampleInterval: number }): Promise<void>;
  disconnect(): void;
}

interface Extras {
  getBattery?: () => Promise<Battery>;
  connection?: NetworkInformation;
}

/** How hard the processor's heat and load press, in words; null where nobody tells. */
export type Heat = "cool" | "warm" | "hot" | "too hot" | null;

const HEAT: { readonly [S in PressureRecord["state"]]: NonNullable<Heat> } = {
  nominal: "cool",
  fair: "warm",
  serious: "hot",
  critical: "too hot",
};

/** Watches the device, and tells when something changes. */
export class Sensors {
  #battery: Battery | null = null;
  readonly #network: NetworkInformation | null;

  /** @param changed called after every change */
  constructor(changed: () => void) {
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
    };
  }

  /** Tell of the heat from now on, where the browser can; returns how to end that. */
  watchHeat(tell: (heat: Heat) => void): () => void {
    const Observer = (
      globalThis as {
        PressureObserver?: new (changed: (records: PressureRecord[]) => void) => PressureObserver;
      }
    ).PressureObserver;
    if (!Observer) return () => undefined;
    const observer = new Observer((records) => {
      const last = records.at(-1);
      if (last) tell(HEAT[last.state]);
    });
    observer.observe("cpu", { sampleInterval: 2000 }).catch(() => tell(null)); // not on this device
    return () => observer.disconnect();
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
