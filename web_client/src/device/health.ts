/** Whether the PS is still there, asked over plain HTTP: browsers send no WebSocket pings. */

import { HANDSHAKE_S } from "../protocol/limits";
import type { Clock } from "./clock";

/** What is needed of `fetch`. */
export type Fetch = (url: string, options: RequestInit) => Promise<Pick<Response, "ok">>;

/** Resolves with whether the PS answered; never rejects. */
export type Probe = () => Promise<boolean>;

/**
 * Asks `/healthz` of the server that a page came from.
 *
 * @param page its address
 * @param ask the browser's `fetch`
 * @param clock after HANDSHAKE_S no answer counts as none
 */
export function healthProbe(page: string, ask: Fetch, clock: Clock): Probe {
  const url = new URL("/healthz", page).href;
  return async () => {
    const late = new AbortController();
    const cancel = clock.after(HANDSHAKE_S, () => late.abort());
    try {
      const answer = await ask(url, { cache: "no-store", redirect: "error", signal: late.signal });
      return answer.ok;
    } catch {
      return false; // no network, no server, or too late: all the same to who asks
    } finally {
      cancel();
    }
  };
}
