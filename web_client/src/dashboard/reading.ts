/** How parts of a reply are read: what is not of the wanted type is not known. */

/** Rows of a table in columns, and where a column is: -1, which no row has, if it is not there. */
export function table(value: unknown): { place: (name: string) => number; rows: unknown[][] } {
  const map = asMap(value);
  const columns = list(map?.columns);
  const places = new Map(columns.map((name, index) => [name, index]));
  return { place: (name) => places.get(name) ?? -1, rows: list(map?.rows).map(list) };
}

/** Some numbers of a map by name; null for those that are not there. */
export function numbers<Name extends string>(
  value: unknown,
  names: readonly Name[],
): { readonly [name in Name]: number | null } {
  const map = asMap(value) ?? {};
  return Object.fromEntries(names.map((name) => [name, number(map[name])])) as {
    [name in Name]: number | null;
  };
}

/** A map; null if it is none. */
export function asMap(value: unknown): Record<string, unknown> | null {
  const isMap = typeof value === "object" && value !== null && !Array.isArray(value);
  return isMap ? (value as Record<string, unknown>) : null;
}

/** An array; an empty one if it is none. */
export function list(value: unknown): unknown[] {
  return Array.isArray(value) ? value : [];
}

/** A finite number; null if it is none. */
export function number(value: unknown): number | null {
  if (typeof value === "bigint") return Number(value);
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}

/** A text; "" if it is none. */
export function text(value: unknown): string {
  return typeof value === "string" ? value : "";
}

/** Whether it is said to be so. */
export function truth(value: unknown): boolean {
  return value === true;
}

/** What may be a word or a number; null if it is neither. */
export function textOrNumber(value: unknown): string | number | null {
  return typeof value === "string" && value !== "" ? value : number(value);
}
