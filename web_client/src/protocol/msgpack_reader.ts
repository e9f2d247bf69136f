/**
 * Reads msgpack as strictly as the protocol asks. `@msgpack/msgpack`, which writes our messages,
 * cannot: it reads 1.0 and 1 alike, accepts broken UTF-8, and sets aside whatever memory a length
 * claims.
 */

import { ProtocolError } from "./errors";
import { MAX_DEPTH } from "./limits";

/** What a message's fields may hold: integers are bigints, floats are numbers. */
export type Value = null | boolean | bigint | number | string | Value[] | ValueMap;

/** A map with text keys. */
export interface ValueMap {
  [key: string]: Value;
}

/** The bytes end before the value does. */
export class EndOfBytes extends ProtocolError {
  constructor() {
    super("a message ends before it is complete");
  }
}

/** Reads values one after the other from bytes; nothing is copied but texts. */
export class MsgpackReader {
  /** Offset of the next byte. */
  offset = 0;
  readonly #bytes: Uint8Array;
  readonly #view: DataView;
  readonly #decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

  constructor(bytes: Uint8Array) {
    this.#bytes = bytes;
    this.#view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  }

  /** The number of items of the array that begins here. */
  arrayLength(): number {
    const tag = this.#uint(1);
    if ((tag & 0xf0) === 0x90) return tag & 0x0f;
    if (tag === 0xdc) return this.#uint(2);
    if (tag === 0xdd) return this.#uint(4);
    throw new ProtocolError("a message is an array of a type name and a map of fields");
  }

  /**
   * One value, whole.
   *
   * @throws ProtocolError for bins, ext types, keys that are no texts, broken UTF-8, and depths of
   *   1000 and more
   */
  value(depth = 0): Value {
    if (depth > MAX_DEPTH) throw new ProtocolError("a message is nested too deep");
    const tag = this.#uint(1);
    if (tag < 0x80) return BigInt(tag);
    if (tag < 0x90) return this.#map(tag & 0x0f, depth);
    if (tag < 0xa0) return this.#array(tag & 0x0f, depth);
    if (tag < 0xc0) return this.#text(tag & 0x1f);
    if (tag >= 0xe0) return BigInt(tag - 0x100);
    switch (tag) {
      case 0xc0:
        return null;
      case 0xc2:
        return false;
      case 0xc3:
        return true;
      case 0xca:
        return this.#view.getFloat32(this.#take(4));
      case 0xcb:
        return this.#view.getFloat64(this.#take(8));
      case 0xcc:
        return BigInt(this.#uint(1));
      case 0xcd:
        return BigInt(this.#uint(2));
      case 0xce:
        return BigInt(this.#uint(4));
      case 0xcf:
        return this.#view.getBigUint64(this.#take(8));
      case 0xd0:
        return BigInt(this.#view.getInt8(this.#take(1)));
      case 0xd1:
        return BigInt(this.#view.getInt16(this.#take(2)));
      case 0xd2:
        return BigInt(this.#view.getInt32(this.#take(4)));
      case 0xd3:
        return this.#view.getBigInt64(this.#take(8));
      case 0xd9:
        return this.#text(this.#uint(1));
      case 0xda:
        return this.#text(this.#uint(2));
      case 0xdb:
        return this.#text(this.#uint(4));
      case 0xdc:
        return this.#array(this.#uint(2), depth);
      case 0xdd:
        return this.#array(this.#uint(4), depth);
      case 0xde:
        return this.#map(this.#uint(2), depth);
      case 0xdf:
        return this.#map(this.#uint(4), depth);
      default:
        throw new ProtocolError(`not a message: byte 0x${tag.toString(16)} where a value begins`);
    }
  }

  /** The length of the bin that begins here; its bytes follow. */
  binLength(): number {
    const tag = this.#uint(1);
    if (tag === 0xc4) return this.#uint(1);
    if (tag === 0xc5) return this.#uint(2);
    if (tag === 0xc6) return this.#uint(4);
    throw new ProtocolError("a payload is not of msgpack's bin type");
  }

  #take(length: number): number {
    const begin = this.offset;
    if (begin + length > this.#bytes.length) throw new EndOfBytes();
    this.offset = begin + length;
    return begin;
  }

  #uint(bytes: 1 | 2 | 4): number {
    const at = this.#take(bytes);
    if (bytes === 1) return this.#view.getUint8(at);
    return bytes === 2 ? this.#view.getUint16(at) : this.#view.getUint32(at);
  }

  #text(length: number): string {
    const begin = this.#take(length);
    if (length <= 32) {
      const short = this.#ascii(begin, length);
      if (short !== null) return short;
    }
    try {
      return this.#decoder.decode(this.#bytes.subarray(begin, begin + length));
    } catch {
      throw new ProtocolError("a text of a message is not UTF-8");
    }
  }

  /** Short plain texts, as most are, without the cost of a decoder's call. */
  #ascii(begin: number, length: number): string | null {
    let text = "";
    for (let i = begin; i < begin + length; i++) {
      const code = this.#view.getUint8(i);
      if (code >= 0x80) return null;
      text += String.fromCharCode(code);
    }
    return text;
  }

  /** Refuses lengths that the bytes left cannot hold, before memory is set aside for them. */
  #expect(items: number): void {
    if (items > this.#bytes.length - this.offset) throw new EndOfBytes();
  }

  #array(length: number, depth: number): Value[] {
    this.#expect(length);
    const items: Value[] = [];
    for (let i = 0; i < length; i++) items.push(this.value(depth + 1));
    return items;
  }

  #map(length: number, depth: number): ValueMap {
    this.#expect(2 * length);
    const map: ValueMap = Object.create(null); // so that a key `__proto__` is a key like any other
    for (let i = 0; i < length; i++) {
      const key = this.value(depth + 1);
      if (typeof key !== "string") throw new ProtocolError("a name in a message is not a text");
      map[key] = this.value(depth + 1);
    }
    return map;
  }
}
