/** The page's side of the worker that is the device. */

import type { Command, Report, Status } from "../device/commands";
import type { KernelName } from "../kernels/kernel";
import { thisKind } from "../ui/kind";
import { deviceMemoryBytes, threadsOf } from "./names";
import type { Keys } from "./saved";

/** What the page learns of its device. */
export interface Listener {
  status(status: Status): void;
  credential(server: string, credential: string): void;
  /** The worker itself failed, which is a fault of ours or of the browser. */
  failed(reason: string): void;
}

/** A device that runs in a worker until it is ended. */
export class DeviceLink {
  readonly #worker: Worker;

  /**
   * @param address where the server speaks the protocol
   * @param paused why it may not work yet; null if it may
   */
  constructor(
    address: string,
    keys: Keys,
    name: string,
    kernel: KernelName | null,
    paused: string | null,
    listener: Listener,
  ) {
    // Vite finds a worker only where it is written out like this.
    this.#worker = new Worker(new URL("../device/device.worker.ts", import.meta.url), {
      type: "module",
    });
    this.#worker.onmessage = ({ data }: MessageEvent<Report>) => {
      if (data.kind === "status") listener.status(data.status);
      else listener.credential(data.server, data.credential);
    };
    this.#worker.onerror = (event) => listener.failed(event.message || "its worker did not start");
    this.#tell({
      kind: "start",
      address,
      ...keys,
      name,
      device_kind: thisKind(),
      kernel,
      memory_bytes: deviceMemoryBytes(),
      threads: threadsOf(navigator.hardwareConcurrency || 2),
      paused,
    });
  }

  /** Let it work, or not: `reason` says why not. */
  allow(reason: string | null): void {
    this.#tell(reason === null ? { kind: "resume" } : { kind: "pause", reason });
  }

  /** Say whether the browser has a network; if it has, do not wait any longer. */
  network(online: boolean): void {
    this.#tell({ kind: "network", online });
  }

  /** Finish what it was given, then end; a second time, end at once. */
  stop(): void {
    this.#tell({ kind: "stop" });
  }

  /** Tell the server how the device is. */
  telemetry(values: { readonly [name: string]: number }): void {
    this.#tell({ kind: "telemetry", values });
  }

  /** End the worker. */
  close(): void {
    this.#worker.terminate();
  }

  #tell(command: Command): void {
    this.#worker.postMessage(command);
  }
}
