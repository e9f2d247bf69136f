/** The stylesheet's colours, for what is drawn on a canvas. */

import { useEffect, useState } from "preact/hooks";

const COLOURS = {
  background: "--background",
  surface: "--surface",
  raised: "--surface-raised",
  line: "--line",
  text: "--text",
  soft: "--text-soft",
  accent: "--accent",
  accentSoft: "--accent-soft",
  warning: "--warning",
  bad: "--bad",
} as const;

export type Colour = keyof typeof COLOURS;
export type Theme = { readonly [name in Colour]: string } & { readonly font: string };

/** The colours now, and again whenever the system turns light or dark. */
export function useTheme(): Theme {
  const [theme, setTheme] = useState(readTheme);
  useEffect(() => {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const read = () => setTheme(readTheme());
    dark.addEventListener("change", read);
    return () => dark.removeEventListener("change", read);
  }, []);
  return theme;
}

function readTheme(): Theme {
  const style = getComputedStyle(document.documentElement);
  const colours = Object.fromEntries(
    Object.entries(COLOURS).map(([name, property]) => [name, style.getPropertyValue(property)]),
  ) as { [name in Colour]: string };
  return { ...colours, font: style.getPropertyValue("--font") };
}
