/** Figures as people read them: three digits and an SI prefix. */

const PREFIXES = ["", "k", "M", "G", "T", "P"] as const;

/**
 * A quantity with its unit, e.g. `12.3 MB`; a dash for one that is not known.
 *
 * @param value in the plain unit (bytes, FLOP/s), 0 or more; null where nobody knows
 * @param unit what follows the prefix
 */
export function quantity(value: number | null, unit: string): string {
  if (value === null || !Number.isFinite(value)) return "–";
  let scaled = value;
  let prefix = 0;
  while (scaled >= 999.5 && prefix < PREFIXES.length - 1) {
    scaled /= 1000;
    prefix += 1;
  }
  const digits = prefix === 0 ? (Number.isInteger(scaled) ? 0 : 1) : digitsAfterPoint(scaled);
  return `${scaled.toFixed(digits)} ${PREFIXES[prefix]}${unit}`.trim();
}

/**
 * A count with thin groups of thousands, e.g. `12 345`.
 *
 * @param value an integer, 0 or more
 */
export function count(value: number): string {
  return String(value).replace(/\B(?=(\d{3})+$)/g, "\u202f");
}

/**
 * A span of time in its two largest parts, e.g. `2 h 5 min`.
 *
 * @param seconds 0 or more
 */
export function duration(seconds: number): string {
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes} min ${whole % 60} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function digitsAfterPoint(value: number): number {
  if (value >= 99.95) return 0;
  return value >= 9.995 ? 1 : 2;
}
