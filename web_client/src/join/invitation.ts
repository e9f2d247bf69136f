/** What the page's address holds, and what of it may be used. */

import { KernelName } from "../kernels/kernel";

/** An invitation to a fleet: the fragment of a join URL, which never reaches a server's log. */
export interface Invitation {
  /** A join code or a credential; empty where the address has none. */
  readonly code: string;
  /** The server's id; empty where the address does not tell. */
  readonly server: string;
  /** Whether whoever made the link has the app. */
  readonly app: boolean;
}

/**
 * Read `#c=CODE&s=SERVER&app=1`. Other names are ignored; a value that is not percent-encoded rightly
 * counts as missing.
 */
export function readInvitation(fragment: string): Invitation {
  const values = new Map<string, string>();
  for (const part of fragment.replace(/^#/, "").split("&")) {
    const at = part.indexOf("=");
    if (at >= 0) values.set(part.slice(0, at), decoded(part.slice(at + 1)));
  }
  return {
    code: values.get("c") ?? "",
    server: values.get("s") ?? "",
    app: values.get("app") === "1",
  };
}

/** The page's fragment once the code is used: what is needed to come back, and no secret. */
export function usedFragment(server: string): string {
  return server ? `#s=${encodeURIComponent(server)}` : "";
}

/** The fragment for what a person typed or pasted: a code, or a join URL with its fragment. */
export function typedFragment(typed: string): string {
  const at = typed.indexOf("#");
  return at >= 0 ? typed.slice(at).trim() : `#c=${encodeURIComponent(typed.trim())}`;
}

/** Where the server of this page speaks the protocol. */
export function socketAddress(page: Pick<Location, "protocol" | "host">): string {
  return `${page.protocol === "https:" ? "wss:" : "ws:"}//${page.host}/ws`;
}

/**
 * The kernel that `?kernel=` asks for, or null where it does not.
 *
 * @throws Error for one that does not exist
 */
export function forcedKernel(search: string): KernelName | null {
  const asked = new URLSearchParams(search).get("kernel");
  if (asked === null) return null;
  const name = Object.values(KernelName).find((kernel) => kernel === asked);
  if (name) return name;
  const names = Object.values(KernelName).join(", ");
  throw new Error(`?kernel=${asked} is no kernel; use one of ${names}, or leave it out.`);
}

function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return "";
  }
}
