/** What the page says of the device's state. */

import type { Status } from "../device/commands";
import { State } from "../device/guest";
import { KernelName } from "../kernels/kernel";
import { ErrorCode } from "../protocol/messages";
import type { Thing } from "./names";
import { Key, Others, Outlook } from "./project";

/** Reason for which a device leaves if the training has no work for it. */
export const NO_WORK = "There is no work for it.";

/** A state in words: a line to read out, and what to do, if anything. */
export interface Said {
  readonly headline: string;
  readonly detail: string;
}

/** What the words depend on, the device's status aside. */
export interface Situation {
  /** Who asks; "" where nobody says. */
  readonly title: string;
  readonly host: string;
  readonly thing: Thing;
  /** Whether the browser has a network. */
  readonly online: boolean;
  /** Whether there was work within the last seconds. */
  readonly helps: boolean;
  /** Whether the server tests the device. */
  readonly tested: boolean;
  /** Whether the device worked today. */
  readonly helped: boolean;
  /** State of the job that runs, or ran last; "" where there is none. */
  readonly training: string;
  readonly outlook: Outlook;
  /** The devices that get the work, if this device gets none. */
  readonly others: Others;
  /** What the browser's key is worth. */
  readonly key: Key;
  /** Why the key was withdrawn; "" if unknown. */
  readonly reason: string;
  /** Whether another tab took over and has ended since. */
  readonly alone: boolean;
}

/** What the page says of a status. */
export function said({ notice }: Status, now: Situation): Said {
  const { thing } = now;
  switch (notice.state) {
    case State.STARTING:
      return { headline: `Testing how fast this ${thing} computes`, detail: "A few seconds." };
    case State.CONNECTING:
      return now.online ? { headline: "Connecting", detail: "" } : offline(thing);
    case State.WORKING:
      if (!now.online) return offline(thing);
      if (now.helps) {
        return { headline: `This ${thing} is helping`, detail: "Keep this page open." };
      }
      if (now.tested) return { headline: "Testing the connection", detail: "A few seconds." };
      return ready(now);
    case State.DRAINING:
      return {
        headline: "Finishing what it was given",
        detail: ["stopping", NO_WORK].includes(notice.reason) ? "" : notice.reason,
      };
    case State.PAUSED:
      if (notice.reason === NO_WORK) return noWork(now);
      return { headline: "Paused", detail: notice.reason };
    case State.WAITING: {
      if (!now.online) return offline(thing);
      const again = `Trying again in ${Math.ceil(notice.retry_s ?? 0)}\u00a0s.`;
      if (notice.lost) {
        return { headline: `No answer from ${now.title || now.host}`, detail: again };
      }
      return { headline: "Not connected", detail: `${sentence(notice.reason)} ${again}` };
    }
    case State.ENDED:
      return ended(notice.reason, notice.code, now);
  }
}

/** Say why a training has no work for a device. */
export function whoseWork(others: Others, title: string): string {
  switch (others) {
    case Others.NOBODY:
      return "This training runs without helpers.";
    case Others.ABLE:
      return "This training gives a kind of work that this browser cannot do.";
    case Others.OWN:
      return `This training gives work only to devices that belong to ${title || "the sender"}.`;
  }
}

/** Tell the owner that there is nothing to do here, and why. */
function noWork({ title, thing, others }: Situation): Said {
  const own = others === Others.OWN;
  return {
    headline: `No work for this ${thing}`,
    detail: [
      whoseWork(others, title),
      "You may close this page. While it is open, helping starts by itself once there is work.",
      own ? `If this ${thing} is one of them, ask for a link for own devices.` : "",
    ]
      .join(" ")
      .trim(),
  };
}

/**
 * What the page says about a key that admits nobody.
 *
 * @param reason why it was withdrawn; "" if unknown
 */
export function deadKey(key: Key, title: string, thing: Thing, reason = ""): Said {
  const who = title || "whoever sent it";
  const another = `Ask ${who} for a new one.`;
  switch (key) {
    case Key.EXPIRED:
      return { headline: "This link has expired", detail: another };
    case Key.USED_UP:
      return {
        headline: "This link was used already",
        detail: `It was not this browser that used it, or its memory was cleared. ${another}`,
      };
    case Key.VOID:
      return { headline: "This link was withdrawn", detail: another };
    case Key.REVOKED:
    case Key.KNOWN: // the server has just refused it, and not yet said why
      return {
        headline: `This ${thing} may not help any more`,
        detail: [
          `${title || "The owner of this page"} has ended that.`,
          reason && `The reason: ${sentence(reason)}`,
          "With a new link, it may help again.",
        ]
          .filter((part) => part !== "")
          .join(" "),
      };
    case Key.QUARANTINED:
      return {
        headline: `This ${thing} may not help at the moment`,
        detail: `Some of its results were wrong. Ask ${title || "whoever sent the link"} about it.`,
      };
    default:
      return {
        headline: "This link does not work",
        detail: `Part of it may be missing. Open it again, or ask ${who} for a new one.`,
      };
  }
}

/** Whether a refusal means that a new code is needed. */
export function needsCode(code: string | null): boolean {
  return code === ErrorCode.CREDENTIAL;
}

/** A kernel in words. */
export function kernelText({ kernel }: Status): string {
  return kernel ? `${KERNELS[kernel.name]} (${kernel.about})` : "";
}

/** What each kernel computes with. */
export const KERNELS: { readonly [K in KernelName]: string } = {
  [KernelName.WEBGPU]: "the graphics chip",
  [KernelName.WASM]: "the processor",
  [KernelName.JS]: "plain JavaScript",
};

/** The device could work, and has no work. */
function ready(now: Situation): Said {
  const { title, thing, training, outlook, helped } = now;
  const headline = `This ${thing} is ready`;
  if (outlook === Outlook.ALONE) {
    const detail = "The training runs without helpers at the moment.";
    return { headline, detail: `${detail} Keep this page open, or come back later.` };
  }
  if (outlook !== Outlook.WORK) return noWork(now);
  switch (training) {
    case "running":
      return {
        headline,
        detail: "It waits for its next part of the training. Keep this page open.",
      };
    case "queued":
      return { headline, detail: "The training has not started yet. Keep this page open." };
    case "paused":
      return { headline, detail: "The training is paused. Keep this page open." };
    case "done":
      if (!helped) break;
      return { headline: "Training finished. Thank you!", detail: "You may close this page." };
  }
  const nothing = `${title || "The other side"} trains nothing at the moment.`;
  return { headline, detail: `${nothing} Keep this page open, or come back later.` };
}

function offline(thing: Thing): Said {
  return {
    headline: `This ${thing} is offline`,
    detail: "Helping continues as soon as there is a network.",
  };
}

function ended(reason: string, code: string | null, now: Situation): Said {
  const { thing } = now;
  switch (code) {
    case ErrorCode.CREDENTIAL:
    case ErrorCode.QUARANTINED: {
      const key = code === ErrorCode.QUARANTINED ? Key.QUARANTINED : now.key;
      return deadKey(key, now.title, thing, now.reason);
    }
    case ErrorCode.DUPLICATE:
      if (now.alone) {
        return {
          headline: "The other tab has stopped",
          detail: `This ${thing} does not help now. It can continue here.`,
        };
      }
      return {
        headline: `This ${thing} helps in another tab`,
        detail: "It can continue here instead.",
      };
    case ErrorCode.VERSION:
      return { headline: "This page is out of date", detail: "Reload it to get the newer one." };
    case null: {
      const thanks = now.helped ? "Stopped. Thank you!" : "Stopped";
      const why = reason === "stopped" ? "" : `${sentence(reason)} `;
      return { headline: thanks, detail: `${why}You may close this page.` };
    }
    default:
      return { headline: `This ${thing} cannot help`, detail: sentence(reason) };
  }
}

function sentence(text: string): string {
  const trimmed = text.trim().replace(/^Error: |`/g, "");
  if (!trimmed) return "";
  const capital = trimmed.charAt(0).toUpperCase() + trimmed.slice(1);
  return /[.!?]$/.test(capital) ? capital : `${capital}.`;
}
