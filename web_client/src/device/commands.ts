/** What the page and the worker that is the device say to each other. */

import type { KernelName } from "../kernels/kernel";
import type { Notice } from "./guest";
import type { Counts } from "./session";

/** To the worker. */
export type Command =
  | {
      readonly kind: "start";
      /** `ws://HOST:PORT/ws`. */
      readonly address: string;
      readonly credential: string;
      readonly join_code: string;
      readonly name: string;
      /** What sort of thing it is, in the protocol's words; "" where unknown. */
      readonly device_kind: string;
      /** The one to use, or null for the best. */
      readonly kernel: KernelName | null;
      readonly memory_bytes: number;
      readonly threads: number;
      /** Why it may not work yet; null if it may. */
      readonly paused: string | null;
    }
  | { readonly kind: "pause"; readonly reason: string }
  | { readonly kind: "resume" }
  | { readonly kind: "stop" }
  /** The page's browser has a network, or none. */
  | { readonly kind: "network"; readonly online: boolean }
  | { readonly kind: "telemetry"; readonly values: { readonly [name: string]: number } };

/** How the device is doing. */
export interface Status {
  readonly notice: Notice;
  readonly counts: Counts;
  /** Whether it has work to answer now. */
  readonly busy: boolean;
  /** Of the session, as the PS counts them; null while there is none. */
  readonly device: string | null;
  readonly kernel: { readonly name: KernelName; readonly about: string } | null;
  /** Kernels that are not used, and why. */
  readonly unused: readonly { readonly name: KernelName; readonly reason: string }[];
}

/** From the worker. */
export type Report =
  | { readonly kind: "status"; readonly status: Status }
  /** To be kept, and used instead of the code from now on. */
  | { readonly kind: "credential"; readonly server: string; readonly credential: string };
