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

  constructor() {
    // The browser takes it away whenever the page is hidden.
    document.addEventListener("visibilitychange", () => void this.#update());
  }

  /** Whether this browser can do it at all. */
  get possible(): boolean {
    return "wakeLock" in navigator;
  }

  set wanted(wanted: boolean) {
    if (wanted === this.#wanted) return;
    this.#wanted = wanted;
    void this.#update();
  }

  async #update(): Promise<void> {
    if (!this.possible) return;
    try {
      if (this.#wanted && document.visibilityState === "visible") {
        this.#lock = await navigator.wakeLock.request("screen");
      } else {
        await this.#lock?.release();
        this.#lock = null;
      }
    } catch {
      this.#lock = null; // a low battery, for one: the screen goes off as usual
    }
  }
}
