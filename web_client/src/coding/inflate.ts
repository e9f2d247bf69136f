/**
 * The reader of zlib streams (RFC 1950, 1951). It has room for what is expected and for nothing
 * more, so no bomb can be made of a stream. `DecompressionStream` reads them too, but answers
 * later, when messages that came after may have been dealt with already.
 */

import { ProtocolError } from "../protocol/errors";
import { adler32 } from "./adler32";
import { LENGTHS_ORDER } from "./deflate";
import { Decoder, FAST } from "./huffman";

/** By symbol from 257 on: the least length, or distance by symbol, and bits that add to it. */
const LENGTH_BASE = [
  3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67, 83, 99, 115, 131,
  163, 195, 227, 258,
];
const LENGTH_BITS = [
  0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0,
];
const DISTANCE_BASE = [
  1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513, 769, 1025, 1537, 2049,
  3073, 4097, 6145, 8193, 12289, 16385, 24577,
];
const DISTANCE_BITS = DISTANCE_BASE.map((_, symbol) => Math.max(0, (symbol >> 1) - 1));
const END_OF_BLOCK = 256;
const MOST_SYMBOLS = 286;
const HEAD_BYTES = 2;
const CHECKSUM_BYTES = 4;

/**
 * Read a zlib stream into an array that it must fill exactly.
 *
 * @throws ProtocolError when the bytes are not one whole stream of so many bytes
 */
export function inflate(stream: Uint8Array, into: Uint8Array): void {
  const [method = 0, flags = 0] = stream;
  const deflated = (method & 15) === 8 && method >> 4 <= 7 && (method * 256 + flags) % 31 === 0;
  if (!deflated || flags & 0x20 || stream.length < HEAD_BYTES + CHECKSUM_BYTES) {
    throw broken("it is no zlib stream without a dictionary");
  }
  const end = stream.length - CHECKSUM_BYTES;
  const read = HEAD_BYTES + new Inflater(stream.subarray(HEAD_BYTES, end), into).run();
  if (read !== end) throw broken("it does not end where its length says");
  const checksum = new DataView(stream.buffer, stream.byteOffset + end).getUint32(0);
  if (checksum !== adler32(into)) throw broken("its checksum is wrong");
}

function broken(why: string): ProtocolError {
  return new ProtocolError(`a coded array cannot be inflated: ${why}`);
}

/** Reads one deflate stream. */
class Inflater {
  #at = 0; // of the next byte that is not held
  #hold = 0;
  #held = 0; // bits in it
  #to = 0; // of the next byte that is written

  constructor(
    private readonly stream: Uint8Array,
    private readonly out: Uint8Array,
  ) {}

  /** Read all blocks, and return how many bytes they have. */
  run(): number {
    for (let last = false; !last;) {
      last = this.#bits(1) === 1;
      const kind = this.#bits(2);
      if (kind === 0) this.#stored();
      else if (kind === 1) this.#coded(FIXED, FIXED_DISTANCES);
      else if (kind === 2) this.#withCodes();
      else throw broken("a block is of no kind that there is");
    }
    if (this.#to !== this.out.length) {
      throw broken(`it has ${this.#to} bytes instead of ${this.out.length}`);
    }
    return this.#at - (this.#held >> 3);
  }

  /** The next bits, 16 at most, the first one lowest. */
  #bits(count: number): number {
    while (this.#held < count) {
      if (this.#at >= this.stream.length) throw broken("it is cut off");
      this.#hold |= this.stream[this.#at++]! << this.#held;
      this.#held += 8;
    }
    const value = this.#hold & ((1 << count) - 1);
    this.#hold >>>= count;
    this.#held -= count;
    return value;
  }

  #symbol(code: Decoder): number {
    while (this.#held < 16 && this.#at < this.stream.length) {
      this.#hold |= this.stream[this.#at++]! << this.#held;
      this.#held += 8;
    }
    const entry = code.table[this.#hold & ((1 << FAST) - 1)]! || code.slow(this.#hold);
    const length = entry & 15;
    if (length === 0 || length > this.#held) throw broken("it has bits that are no code");
    this.#hold >>>= length;
    this.#held -= length;
    return entry >> 4;
  }

  #stored(): void {
    this.#bits(this.#held & 7);
    const length = this.#bits(16);
    if ((length ^ 0xffff) !== this.#bits(16)) throw broken("a block's length is wrong");
    const from = this.#at - (this.#held >> 3);
    this.#hold = this.#held = 0;
    this.#at = from + length;
    if (this.#at > this.stream.length) throw broken("it is cut off");
    this.#need(length);
    this.out.set(this.stream.subarray(from, this.#at), this.#to);
    this.#to += length;
  }

  #withCodes(): void {
    const symbols = this.#bits(5) + 257;
    const distances = this.#bits(5) + 1;
    const ofLengths = new Uint8Array(LENGTHS_ORDER.length);
    const given = this.#bits(4) + 4;
    for (const symbol of LENGTHS_ORDER.slice(0, given)) ofLengths[symbol] = this.#bits(3);
    if (symbols > MOST_SYMBOLS || distances > DISTANCE_BASE.length) {
      throw broken("a code has too many symbols");
    }
    const lengths = this.#lengths(decoder(ofLengths), symbols + distances);
    if (lengths[END_OF_BLOCK] === 0) throw broken("a block has no end");
    this.#coded(decoder(lengths.subarray(0, symbols)), decoder(lengths.subarray(symbols)));
  }

  #lengths(code: Decoder, count: number): Uint8Array {
    const lengths = new Uint8Array(count);
    for (let at = 0; at < count;) {
      const symbol = this.#symbol(code);
      if (symbol < 16) {
        lengths[at++] = symbol;
        continue;
      }
      if (symbol === 16 && at === 0) throw broken("a length repeats nothing");
      const repeated = symbol === 16 ? lengths[at - 1]! : 0;
      const times =
        symbol === 16 ? 3 + this.#bits(2) : symbol === 17 ? 3 + this.#bits(3) : 11 + this.#bits(7);
      if (at + times > count) throw broken("there are too many lengths");
      lengths.fill(repeated, at, at + times);
      at += times;
    }
    return lengths;
  }

  /** Read a block up to its end. */
  #coded(code: Decoder, distances: Decoder): void {
    for (;;) {
      const symbol = this.#literals(code);
      if (symbol === END_OF_BLOCK) return;
      const length = symbol - END_OF_BLOCK - 1;
      if (length >= LENGTH_BASE.length) throw broken("it has a length that there is not");
      const count = LENGTH_BASE[length]! + this.#bits(LENGTH_BITS[length]!);
      const far = this.#symbol(distances);
      if (far >= DISTANCE_BASE.length) throw broken("it has a distance that there is not");
      const distance = DISTANCE_BASE[far]! + this.#bits(DISTANCE_BITS[far]!);
      if (distance > this.#to) throw broken("it copies what was before its begin");
      this.#need(count);
      // One by one, for what is copied may be what was just written.
      for (let i = 0; i < count; i++, this.#to++) {
        this.out[this.#to] = this.out[this.#to - distance]!;
      }
    }
  }

  /** Write bytes up to the next symbol that is none, and return that: as `#symbol`, in a loop. */
  #literals(code: Decoder): number {
    const { stream, out } = this;
    const { table } = code;
    const bytes = stream.length;
    let at = this.#at;
    let hold = this.#hold;
    let held = this.#held;
    let to = this.#to;
    for (;;) {
      while (held < 16 && at < bytes) {
        hold |= stream[at++]! << held;
        held += 8;
      }
      const entry = table[hold & ((1 << FAST) - 1)]! || code.slow(hold);
      const length = entry & 15;
      if (length === 0 || length > held) throw broken("it has bits that are no code");
      hold >>>= length;
      held -= length;
      if (entry >= END_OF_BLOCK << 4) {
        this.#at = at;
        this.#hold = hold;
        this.#held = held;
        this.#to = to;
        return entry >> 4;
      }
      if (to === out.length) throw tooMany(out.length);
      out[to++] = entry >> 4;
    }
  }

  #need(bytes: number): void {
    if (this.#to + bytes > this.out.length) throw tooMany(this.out.length);
  }
}

function tooMany(bytes: number): ProtocolError {
  return broken(`it has more than ${bytes} bytes`);
}

function decoder(lengths: Uint8Array): Decoder {
  try {
    return new Decoder(lengths);
  } catch (error) {
    throw broken(`its codes are none: ${(error as RangeError).message}`);
  }
}

const FIXED = new Decoder(
  Uint8Array.from({ length: 288 }, (_, n) => (n < 144 ? 8 : n < 256 ? 9 : n < 280 ? 7 : 8)),
);
const FIXED_DISTANCES = new Decoder(new Uint8Array(32).fill(5));
