/** What the page says of the device's state. */

import type { Status } from "../device/commands";
import { State } from "../device/guest";
import { KernelName } from "../kernels/kernel";
import { ErrorCode } from "../protocol/messages";

/** A state in words: a line to read out, and what to do, if anything. */
export interface Said {
  readonly headline: string;
  readonly detail: string;
}

/** What the page says of a status. `idle`: whether there is no work now. */
export function said({ notice }: Status, idle = false): Said {
  switch (notice.state) {
    case State.STARTING:
      return { headline: "Testing how fast this device multiplies", detail: "A few seconds." };
    case State.CONNECTING:
      return { headline: "Connecting", detail: "" };
    case State.WORKING:
      if (idle) {
        return {
          headline: "This device is ready",
          detail: "There is nothing to do at the moment. Keep this page open.",
        };
      }
      return { headline: "This device is helping", detail: "Keep this page open." };
    case State.DRAINING:
      return { headline: "Finishing what it was given", detail: notice.reason };
    case State.PAUSED:
      return { headline: "Paused", detail: notice.reason };
    case State.WAITING:
      return {
        headline: "Not connected",
        detail: `${sentence(notice.reason)} Trying again in ${Math.ceil(notice.retry_s ?? 0)}\u00a0s.`,
      };
    case State.ENDED:
      return ended(notice.reason, notice.code);
  }
}

/** Whether a refusal means that a new code is needed. */
export function needsCode(code: string | null): boolean {
  return code === ErrorCode.CREDENTIAL;
}

/** A kernel in words. */
export function kernelText({ kernel }: Status): string {
  if (!kernel) return "";
  const by = {
    [KernelName.WEBGPU]: "the GPU",
    [KernelName.WASM]: "the processor",
    [KernelName.JS]: "plain JavaScript",
  }[kernel.name];
  return `${by} (${kernel.about})`;
}

function ended(reason: string, code: string | null): Said {
  switch (code) {
    case ErrorCode.CREDENTIAL:
      return { headline: "The server does not let this device in", detail: sentence(reason) };
    case ErrorCode.DUPLICATE:
      return {
        headline: "This device joined in another tab",
        detail: "The other tab continues. Join again to continue here.",
      };
    case ErrorCode.QUARANTINED:
      return { headline: "The server does not want this device's work", detail: sentence(reason) };
    case ErrorCode.VERSION:
      return {
        headline: "This page is older than the server",
        detail: "Reload it to get the newer one.",
      };
    case null:
      return { headline: "Stopped", detail: reason === "stopped" ? "" : sentence(reason) };
    default:
      return { headline: "This device cannot help", detail: sentence(reason) };
  }
}

function sentence(text: string): string {
  const trimmed = text.trim().replace(/^Error: |`/g, "");
  if (!trimmed) return "";
  const capital = trimmed.charAt(0).toUpperCase() + trimmed.slice(1);
  return /[.!?]$/.test(capital) ? capital : `${capital}.`;
}
