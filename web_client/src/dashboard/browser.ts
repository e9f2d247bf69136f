/** What the page needs of the browser: sockets, timers, clock, where it was opened from. */

import { kept } from "../ui/storage";
import type { PageWorld } from "./session";

const KEPT_TOKEN = "cleave.viewer";
/** How often a tab that nobody looks at asks: its title can be read all the same. */
const UNSEEN_S = 15;

/** The world as this browser has it. */
export function browserWorld(): PageWorld {
  return {
    connect: (url) => new WebSocket(url),
    after: (seconds, run) => {
      const timer = setTimeout(run, seconds * 1000);
      return () => clearTimeout(timer);
    },
    random: Math.random,
    now_s: () => Date.now() / 1000,
    painted: (run) => {
      // A frame that is asked for comes before painting; the task after it comes after.
      const frame = requestAnimationFrame(() => {
        clearTimeout(unseen);
        setTimeout(run);
      });
      const unseen = setTimeout(() => {
        cancelAnimationFrame(frame);
        run();
      }, UNSEEN_S * 1000);
    },
  };
}

/** What `location` says of where the page was opened from. */
export type Address = Pick<Location, "hash" | "pathname" | "search">;

/**
 * The viewer token: from the address, which is cleaned of it where this tab can keep it, else as
 * this tab has kept it; "" if there is none.
 *
 * @param storage of the tab, or null where the browser forbids it
 * @param clean puts another address in the place of this one
 */
export function takeToken(
  storage: Pick<Storage, "getItem" | "setItem"> | null,
  address: Address,
  clean: (url: string) => void,
): string {
  const given = new URLSearchParams(address.hash.slice(1)).get("c");
  if (given === null) return storage?.getItem(KEPT_TOKEN) ?? "";
  if (kept(storage, KEPT_TOKEN, given)) clean(address.pathname + address.search);
  return given;
}

/** Where the PS speaks its protocol, seen from the page that it served. */
export function socketUrl(): string {
  const url = new URL("ws", location.href);
  url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
  url.hash = "";
  url.search = "";
  return url.href;
}
