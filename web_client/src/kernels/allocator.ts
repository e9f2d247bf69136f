/** Which parts of a memory are free: first fit, neighbours joined again when freed. */

const ALIGNMENT = 16;

interface Span {
  begin: number;
  end: number;
}

/** Addresses from `begin` to `end`, none taken at first. */
export class Allocator {
  readonly #free: Span[] = []; // by address, never touching each other
  readonly #taken = new Map<number, number>(); // length by address
  #end: number;

  constructor(begin: number, end: number) {
    this.#end = Math.ceil(begin / ALIGNMENT) * ALIGNMENT;
    this.extend(end);
  }

  /** Bytes that are taken. */
  get taken_bytes(): number {
    let sum = 0;
    for (const length of this.#taken.values()) sum += length;
    return sum;
  }

  /** The memory has grown: it ends here now. */
  extend(end: number): void {
    const last = this.#free.at(-1);
    const aligned = Math.floor(end / ALIGNMENT) * ALIGNMENT;
    if (last && last.end === this.#end) last.end = aligned;
    else if (aligned > this.#end) this.#free.push({ begin: this.#end, end: aligned });
    this.#end = Math.max(this.#end, aligned);
  }

  /** The address of so many free bytes, 16-byte aligned, or null where there are none. */
  take(bytes: number): number | null {
    const length = Math.max(ALIGNMENT, Math.ceil(bytes / ALIGNMENT) * ALIGNMENT);
    const index = this.#free.findIndex(({ begin, end }) => end - begin >= length);
    const span = this.#free[index];
    if (span === undefined) return null;
    const address = span.begin;
    span.begin += length;
    if (span.begin === span.end) this.#free.splice(index, 1);
    this.#taken.set(address, length);
    return address;
  }

  /**
   * Free what `take` gave.
   *
   * @throws RangeError for an address that is not taken
   */
  give(address: number): void {
    const length = this.#taken.get(address);
    if (length === undefined) throw new RangeError(`nothing is taken at ${address}`);
    this.#taken.delete(address);
    const end = address + length;
    let at = this.#free.findIndex((span) => span.begin > address);
    if (at < 0) at = this.#free.length;
    const before = this.#free[at - 1];
    const after = this.#free[at];
    const joinsBefore = before !== undefined && before.end === address;
    const joinsAfter = after !== undefined && after.begin === end;
    if (joinsBefore && joinsAfter) {
      before.end = after.end;
      this.#free.splice(at, 1);
    } else if (joinsBefore) before.end = end;
    else if (joinsAfter) after.begin = address;
    else this.#free.splice(at, 0, { begin: address, end });
  }
}
