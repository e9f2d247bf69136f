/** Whether a client comes back by itself after its session, and when: docs/protocol.md's table. */

import { MAX_RETRY_AFTER_S } from "./limits";
import { ByeCode, ErrorCode, type MessageOf } from "./messages";

/** The client got what it wanted. */
const DONE: ReadonlySet<string> = new Set([ByeCode.DRAINED, ByeCode.MEASURED, ByeCode.LEAVING]);
/** Refusals after which the same client may be welcome. */
const PASSING: ReadonlySet<string> = new Set([ErrorCode.LIMIT, ErrorCode.PROTOCOL]);
const KNOWN: ReadonlySet<string> = new Set(Object.values(ErrorCode));

/**
 * Seconds to wait at least before coming back, a lost connection's wait aside; null for never.
 *
 * @param message what the PS ended the session with
 */
export function leastWait_s(message: MessageOf<"bye"> | MessageOf<"error">): number | null {
  const stated_s = Math.min(message.retry_after_s, MAX_RETRY_AFTER_S);
  if (message.type === "bye") return DONE.has(message.code) ? null : stated_s;
  if (PASSING.has(message.code)) return stated_s;
  return stated_s > 0 && !KNOWN.has(message.code) ? stated_s : null;
}
