/** What sort of thing a browser runs on, as far as it tells. */

/** What only some browsers tell. */
interface Extras {
  readonly userAgentData?: { readonly mobile: boolean };
}

export interface Hints {
  readonly userAgent: string;
  /** `navigator.userAgentData.mobile`; undefined in browsers that lack it. */
  readonly mobile: boolean | undefined;
  readonly maxTouchPoints: number;
}

/** What this browser runs on. */
export function thisKind(): ReturnType<typeof deviceKind> {
  const { userAgent, maxTouchPoints } = navigator;
  const mobile = (navigator as Extras).userAgentData?.mobile;
  return deviceKind({ userAgent, mobile, maxTouchPoints });
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
