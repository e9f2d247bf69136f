/**
 * Deflate with Huffman codes alone, in a zlib stream (RFC 1950, 1951). Exponents have frequencies
 * and no repetitions; `CompressionStream` cannot be told so, and searches for them at length.
 */

import { adler32 } from "./adler32";
import { codeLengths, codesOf, LONGEST } from "./huffman";

/** Bytes for which a code is made: frequencies change in an array, and a code takes 60 bytes. */
const BLOCK = 32768;
const END_OF_BLOCK = 256;
/** The order in which lengths of the code of lengths are written. */
export const LENGTHS_ORDER: readonly number[] = [
  16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15,
];
const LONGEST_OF_LENGTHS = 7;
/** "Zeros follow": three to ten of them, and eleven to 138. */
const SOME_ZEROS = 17;
const MANY_ZEROS = 18;

/** The zlib stream of at least one byte. */
export function deflate(data: Uint8Array): Uint8Array {
  const writer = new BitWriter(room(data.length));
  writer.write(0x0178, 16); // deflate, a window of 32 kB, no dictionary, quick
  for (let at = 0; at < data.length; at += BLOCK) {
    const end = Math.min(at + BLOCK, data.length);
    writeBlock(writer, data.subarray(at, end), end === data.length);
  }
  writer.fill();
  const checksum = adler32(data);
  for (let shift = 24; shift >= 0; shift -= 8) writer.write((checksum >>> shift) & 0xff, 8);
  return writer.bytes();
}

/** No code is longer than 15 bits, and no block's head than 600 bytes. */
function room(bytes: number): number {
  return 2 * bytes + 600 * Math.ceil(bytes / BLOCK) + 16;
}

function writeBlock(writer: BitWriter, data: Uint8Array, last: boolean): void {
  const counts = new Uint32Array(END_OF_BLOCK + 1);
  for (const byte of data) counts[byte]! += 1;
  counts[END_OF_BLOCK] = 1;
  const lengths = codeLengths(counts, LONGEST);
  const codes = codesOf(lengths);
  writer.write(last ? 1 : 0, 1);
  writer.write(2, 2); // codes of its own
  writeLengths(writer, lengths);
  writer.writeAll(data, codes, lengths);
  writer.write(codes[END_OF_BLOCK]!, lengths[END_OF_BLOCK]!);
}

/** Write the lengths of a code, themselves coded; there is no code for distances. */
function writeLengths(writer: BitWriter, lengths: Uint8Array): void {
  const tokens = zerosJoined([...lengths, 0]);
  const counts = new Uint32Array(LENGTHS_ORDER.length);
  for (const { symbol } of tokens) counts[symbol]! += 1;
  const ofLengths = codeLengths(counts, LONGEST_OF_LENGTHS);
  const codes = codesOf(ofLengths);
  writer.write(lengths.length - 257, 5);
  writer.write(0, 5); // one length of a code for distances, which is 0
  writer.write(LENGTHS_ORDER.length - 4, 4);
  for (const symbol of LENGTHS_ORDER) writer.write(ofLengths[symbol]!, 3);
  for (const { symbol, extra, bits } of tokens) {
    writer.write(codes[symbol]!, ofLengths[symbol]!);
    writer.write(extra, bits);
  }
}

interface Token {
  readonly symbol: number;
  readonly extra: number;
  /** Of `extra`. */
  readonly bits: number;
}

function zerosJoined(lengths: readonly number[]): Token[] {
  const tokens: Token[] = [];
  for (let at = 0; at < lengths.length;) {
    let zeros = 0;
    while (zeros < 138 && lengths[at + zeros] === 0) zeros += 1;
    if (zeros >= 11) tokens.push({ symbol: MANY_ZEROS, extra: zeros - 11, bits: 7 });
    else if (zeros >= 3) tokens.push({ symbol: SOME_ZEROS, extra: zeros - 3, bits: 3 });
    else {
      tokens.push({ symbol: lengths[at]!, extra: 0, bits: 0 });
      zeros = 1;
    }
    at += zeros;
  }
  return tokens;
}

/** Writes bits, the lowest first. */
class BitWriter {
  readonly #out: Uint8Array;
  #at = 0;
  #hold = 0;
  #held = 0; // bits in it, below 16

  constructor(bytes: number) {
    this.#out = new Uint8Array(bytes);
  }

  /** Write the lowest bits of a value, 16 at most. */
  write(value: number, bits: number): void {
    this.#hold |= value << this.#held;
    this.#held += bits;
    if (this.#held < 16) return;
    this.#out[this.#at++] = this.#hold & 0xff;
    this.#out[this.#at++] = (this.#hold >>> 8) & 0xff;
    this.#hold >>>= 16;
    this.#held -= 16;
  }

  /** Write the code of each byte: as `write` does, without the calls. */
  writeAll(data: Uint8Array, codes: Uint16Array, lengths: Uint8Array): void {
    const out = this.#out;
    let at = this.#at;
    let hold = this.#hold;
    let held = this.#held;
    for (let i = 0; i < data.length; i++) {
      const byte = data[i]!;
      hold |= codes[byte]! << held;
      held += lengths[byte]!;
      if (held >= 16) {
        out[at++] = hold & 0xff;
        out[at++] = (hold >>> 8) & 0xff;
        hold >>>= 16;
        held -= 16;
      }
    }
    this.#at = at;
    this.#hold = hold;
    this.#held = held;
  }

  /** Go on at the next whole byte. */
  fill(): void {
    while (this.#held > 0) {
      this.#out[this.#at++] = this.#hold & 0xff;
      this.#hold >>>= 8;
      this.#held = Math.max(0, this.#held - 8);
    }
    this.#hold = 0;
  }

  /** All that was written, in whole bytes. */
  bytes(): Uint8Array {
    this.fill();
    return this.#out.subarray(0, this.#at);
  }
}
