/** What the page needs of the browser: sockets, timers, clock, where it was opened from. */

import type { PageWorld } from "./session";

const KEPT_TOKEN = "cleave.viewer";

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
    // A frame that is asked for comes before painting; the task after it comes after.
    painted: (run) => requestAnimationFrame(() => setTimeout(run)),
  };
}

/**
 * The viewer token: from the address, which is cleaned of it, else as this tab has kept it;
 * "" if there is none.
 */
export function takeToken(): string {
  const given = new URLSearchParams(location.hash.slice(1)).get("c");
  if (given !== null) {
    sessionStorage.setItem(KEPT_TOKEN, given);
    history.replaceState(null, "", location.pathname + location.search);
  }
  return sessionStorage.getItem(KEPT_TOKEN) ?? "";
}

/** Where the PS speaks its protocol, seen from the page that it served. */
export function socketUrl(): string {
  const url = new URL("ws", location.href);
  url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
  url.hash = "";
  url.search = "";
  return url.href;
}
