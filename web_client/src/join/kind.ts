/** What sort of thing a browser runs on, as far as it tells. */

export interface Hints {
  readonly userAgent: string;
  /** `navigator.userAgentData.mobile`; undefined in browsers that lack it. */
  readonly mobile: boolean | undefined;
  readonly maxTouchPoints: number;
}

/** In the protocol's words; "" for computers, since no page can tell a laptop from a desktop. */
export function deviceKind({ userAgent, mobile, maxTouchPoints }: Hints): "phone" | "tablet" | "" {
  if (mobile || /iPhone|iPod/.test(userAgent)) return "phone";
  if (userAgent.includes("iPad")) return "tablet";
  // An iPad says that it is a Mac, and no Mac has a touch screen.
  if (userAgent.includes("Macintosh")) return maxTouchPoints > 1 ? "tablet" : "";
  if (!userAgent.includes("Android")) return "";
  return mobile === undefined && userAgent.includes("Mobile") ? "phone" : "tablet";
}
