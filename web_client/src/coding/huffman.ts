/** Canonical Huffman codes, as deflate (RFC 1951) has them: a code is known by its lengths. */

/** Longest code of deflate, in bits. */
export const LONGEST = 15;

/**
 * The lengths of a Huffman code, in bits; 0 for what does not occur.
 *
 * @param counts how often each symbol occurs; two of them at least do
 * @param longest what no code is longer than; 2^longest is at least the number of symbols
 */
export function codeLengths(counts: Uint32Array, longest: number): Uint8Array {
  let weights = counts;
  for (;;) {
    const lengths = unlimitedLengths(weights);
    if (lengths.every((length) => length <= longest)) return lengths;
    // Rare symbols become less rare, which costs hardly a bit, for they are rare.
    weights = weights.map((weight) => (weight + 1) >> 1);
  }
}

function unlimitedLengths(counts: Uint32Array): Uint8Array {
  const leaves = [...counts.keys()].filter((symbol) => counts[symbol]! > 0);
  leaves.sort((a, b) => counts[a]! - counts[b]!);
  const weights = leaves.map((symbol) => counts[symbol]!);
  // Joined pairs come out in the order of their weights, so both queues are sorted all the time.
  const parents = new Uint16Array(2 * leaves.length);
  let leaf = 0;
  let joined = leaves.length;
  const lightest = () => {
    const isLeaf =
      leaf < leaves.length && (joined >= weights.length || weights[leaf]! <= weights[joined]!);
    return isLeaf ? leaf++ : joined++;
  };
  for (let pairs = 1; pairs < leaves.length; pairs++) {
    const first = lightest();
    const second = lightest();
    parents[first] = parents[second] = weights.length;
    weights.push(weights[first]! + weights[second]!);
  }
  const depths = new Uint8Array(weights.length);
  for (let node = weights.length - 2; node >= 0; node--) {
    depths[node] = depths[parents[node]!]! + 1;
  }
  const lengths = new Uint8Array(counts.length);
  for (const [at, symbol] of leaves.entries()) lengths[symbol] = depths[at]!;
  return lengths;
}

/** The code of each symbol, its first bit lowest, as deflate writes them. */
export function codesOf(lengths: Uint8Array): Uint16Array {
  const next = firstCodes(lengths);
  return Uint16Array.from(lengths, (length) => reversed(next[length]!++, length));
}

/** A code as it is read. */
export class Decoder {
  /** By the next `FAST` bits: a symbol, times 16, and its length; 0 where its code is longer. */
  readonly table = new Uint16Array(1 << FAST);
  readonly #counts = new Uint16Array(LONGEST + 1);
  readonly #symbols: Uint16Array;

  /**
   * @param lengths at most 15 each
   * @throws RangeError when they are the lengths of no code, or of one that leaves bits without a
   *   meaning; only a single code of one bit may, and none at all
   */
  constructor(lengths: Uint8Array) {
    for (const length of lengths) this.#counts[length]! += 1;
    this.#counts[0] = 0;
    let left = 1;
    for (let length = 1; length <= LONGEST; length++) {
      left = 2 * left - this.#counts[length]!;
      if (left < 0) throw new RangeError("more codes than there is room for");
    }
    const used = this.#counts.reduce((sum, count) => sum + count);
    if (left > 0 && used > this.#counts[1]!) throw new RangeError("bits without a meaning");
    this.#symbols = new Uint16Array(used);
    const at = new Uint16Array(LONGEST + 2);
    for (let n = 1; n <= LONGEST; n++) at[n + 1] = at[n]! + this.#counts[n]!;
    const next = firstCodes(lengths);
    for (const [symbol, length] of lengths.entries()) {
      if (length === 0) continue;
      this.#symbols[at[length]!++] = symbol;
      if (length > FAST) continue;
      const step = 1 << length;
      const entry = (symbol << 4) | length;
      for (let bits = reversed(next[length]!++, length); bits < 1 << FAST; bits += step) {
        this.table[bits] = entry;
      }
    }
  }

  /** What `table` would hold for the next 15 bits if it had room; 0 where they are no code. */
  slow(bits: number): number {
    let code = 0;
    let first = 0;
    let index = 0;
    for (let length = 1; length <= LONGEST; length++) {
      code |= (bits >> (length - 1)) & 1;
      const count = this.#counts[length]!;
      if (code - first < count) return (this.#symbols[index + code - first]! << 4) | length;
      index += count;
      first = (first + count) << 1;
      code <<= 1;
    }
    return 0;
  }
}

/** Bits that are looked up at once: nearly all codes are shorter, and the table fits any cache. */
export const FAST = 10;

function firstCodes(lengths: Uint8Array): Uint16Array {
  const counts = new Uint16Array(LONGEST + 1);
  for (const length of lengths) counts[length]! += 1;
  const first = new Uint16Array(LONGEST + 1);
  for (let n = 2; n <= LONGEST; n++) first[n] = (first[n - 1]! + counts[n - 1]!) << 1;
  return first;
}

function reversed(code: number, length: number): number {
  let found = 0;
  for (let bit = 0; bit < length; bit++) found |= ((code >> bit) & 1) << (length - 1 - bit);
  return found;
}
