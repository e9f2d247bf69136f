/** Messages to bytes and back: one msgpack array `[type, fields, payload?]` a message. */

import { encode as pack } from "@msgpack/msgpack";
import { ProtocolError, VersionError } from "./errors";
import {
  MAX_HEADER_BYTES,
  MAX_ID,
  MAX_IDS,
  MAX_MESSAGE_BYTES,
  MAX_NESTING,
  MAX_RUN_INPUTS,
  MAX_TEXT,
  VERSION,
} from "./limits";
import { Kind, type Message, type Plain, Role, SCHEMAS, type Schema } from "./messages";
import { EndOfBytes, MsgpackReader, type Value, type ValueMap } from "./msgpack_reader";

/**
 * The message's bytes, in a buffer of their own.
 *
 * @throws ProtocolError when it is larger than the protocol allows
 */
export function encode(message: Message): Uint8Array<ArrayBuffer> {
  const schema: Schema = SCHEMAS[message.type];
  const given = message as unknown as { [name: string]: unknown };
  const fields: { [name: string]: unknown } = {};
  for (const [name, { kind }] of Object.entries(schema.fields)) {
    // The library writes numbers over 2^32 as floats, which no count may be.
    if (kind === Kind.COUNT) fields[name] = BigInt(given[name] as number);
    else if (kind === Kind.COUNTS || kind === Kind.SIZES) {
      fields[name] = (given[name] as number[]).map(BigInt);
    } else fields[name] = given[name];
  }
  const body = pack([message.type, fields], { useBigInt64: true });
  const payload = "payload" in message ? message.payload : null;
  const bin = payload ? binHeader(payload.length) : [];
  const headerBytes = body.length + bin.length;
  const bytes = headerBytes + (payload?.length ?? 0);
  if (headerBytes > MAX_HEADER_BYTES || bytes > MAX_MESSAGE_BYTES) {
    throw new ProtocolError(`a ${message.type} message of ${bytes} bytes is over the limit`);
  }
  if (!payload) return body.slice();
  const whole = new Uint8Array(bytes);
  whole.set(body);
  whole[0] = 0x93; // an array of three: the payload follows
  whole.set(bin, body.length);
  whole.set(payload, headerBytes);
  return whole;
}

/**
 * Read one message. Its payload, if any, is a view into `bytes`, which need not be aligned; its
 * texts are such that they can be shown. Of a `hello` in another version only what says so is read.
 *
 * @throws ProtocolError for anything that is not a message of this protocol
 * @throws VersionError for a `welcome` in another version
 */
export function decode(bytes: Uint8Array): Message {
  if (bytes.length > MAX_MESSAGE_BYTES) {
    throw new ProtocolError(`a message of ${bytes.length} bytes is over the limit`);
  }
  const reader = new MsgpackReader(bytes.subarray(0, MAX_HEADER_BYTES));
  try {
    return readMessage(reader, bytes);
  } catch (error) {
    if (error instanceof EndOfBytes && bytes.length > MAX_HEADER_BYTES) {
      throw new ProtocolError("the fields of a message are over the limit of a mebibyte");
    }
    throw error;
  }
}

/** A text that a receiver accepts: well-formed, and no longer than the protocol allows. */
export function cleanText(text: string): string {
  const wellFormed = new TextDecoder().decode(new TextEncoder().encode(text));
  return codePoints(wellFormed) > MAX_TEXT
    ? Array.from(wellFormed).slice(0, MAX_TEXT).join("")
    : wellFormed;
}

/** What a peer says, as it can be shown: on one line, without marks that turn writing around. */
export function shown(text: string): string {
  return text.replace(/[^\S ]/gu, " ").replace(/[\p{C}\p{Zl}\p{Zp}]/gu, "");
}

function readMessage(reader: MsgpackReader, bytes: Uint8Array): Message {
  const parts = reader.arrayLength();
  const type = reader.value();
  const raw = reader.value();
  if (typeof type !== "string" || !isMap(raw)) {
    throw new ProtocolError("a message is an array of a type name and a map of fields");
  }
  if (!Object.hasOwn(SCHEMAS, type)) {
    throw new ProtocolError(`unknown message type ${JSON.stringify(type.slice(0, 40))}`);
  }
  const schema: Schema = SCHEMAS[type as Message["type"]];
  if (parts !== (schema.payload ? 3 : 2)) {
    throw new ProtocolError(`a ${type} message has ${parts} parts`);
  }
  const message: { [name: string]: unknown } = { type, ...readFields(type, schema, raw) };
  if (schema.payload) {
    const length = reader.binLength();
    if (reader.offset + length !== bytes.length) {
      throw new ProtocolError(
        `the payload of a ${type} message states ${length} bytes, ` +
          `${bytes.length - reader.offset} came`,
      );
    }
    message.payload = bytes.subarray(reader.offset);
  } else if (reader.offset !== bytes.length) {
    throw new ProtocolError(`bytes follow the end of a ${type} message`);
  }
  return message as Message;
}

/** The fields of `hello` that mean the same in every version of the protocol. */
const OF_ALL_VERSIONS: ReadonlySet<string> = new Set(["role", "version", "versions"]);

function readFields(type: string, schema: Schema, raw: ValueMap): { [name: string]: unknown } {
  const another = isAnotherVersion(schema, raw.version);
  if (another && type === "welcome") {
    throw new VersionError(
      `the server continues in protocol version ${raw.version} and this client speaks ${VERSION}`,
    );
  }
  const fields: { [name: string]: unknown } = {};
  for (const [name, { kind, missing }] of Object.entries(schema.fields)) {
    const value = another && !OF_ALL_VERSIONS.has(name) ? undefined : raw[name];
    if (value !== undefined) {
      const checked = check(kind, value);
      if (checked === undefined) {
        throw new ProtocolError(`field '${name}' of a ${type} message is not valid: no ${kind}`);
      }
      fields[name] = checked;
    } else if (missing) {
      fields[name] = missing();
    } else {
      throw new ProtocolError(`a ${type} message lacks its '${name}'`);
    }
  }
  return fields;
}

function isAnotherVersion(schema: Schema, version: Value | undefined): boolean {
  return "version" in schema.fields && isId(version ?? null) && version !== BigInt(VERSION);
}

/** The value as its kind wants it, or undefined where it is none of that kind. */
function check(kind: Kind, value: Value): unknown {
  switch (kind) {
    case Kind.ID:
      return isId(value) ? value : undefined;
    case Kind.COUNT:
      return isId(value) ? Number(value) : undefined;
    case Kind.REAL: {
      const number = finite(value);
      return number !== undefined && number >= 0 ? number : undefined;
    }
    case Kind.TEXT:
      return isText(value) ? shown(value) : undefined;
    case Kind.SECRET:
      return isText(value) ? value : undefined;
    case Kind.BOOL:
      return typeof value === "boolean" ? value : undefined;
    case Kind.IDS:
      return listOf(value, MAX_IDS, isId);
    case Kind.INPUTS:
      return listOf(value, MAX_RUN_INPUTS, isId);
    case Kind.SIZES:
      return listOf(value, MAX_RUN_INPUTS, isId)?.map(Number);
    case Kind.COUNTS:
      return listOf(value, MAX_IDS, isId)?.map(Number);
    case Kind.TEXTS:
      return listOf(value, MAX_IDS, isText)?.map(shown);
    case Kind.VALUES:
      return isMap(value) ? mapped(value, finite) : undefined;
    case Kind.MAP:
      return isMap(value) ? mapped(value, (item) => plain(item, 1)) : undefined;
    case Kind.ROLE:
      return Object.values(Role).find((role) => role === value);
  }
}

function isMap(value: Value): value is ValueMap {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function isId(value: Value): value is bigint {
  return typeof value === "bigint" && value >= 0n && value <= MAX_ID;
}

function isText(value: Value): value is string {
  return typeof value === "string" && (value.length <= MAX_TEXT || codePoints(value) <= MAX_TEXT);
}

function codePoints(text: string): number {
  let count = 0;
  for (const _ of text) count += 1;
  return count;
}

function finite(value: Value): number | undefined {
  const number = typeof value === "bigint" ? Number(value) : value;
  return typeof number === "number" && Number.isFinite(number) ? number : undefined;
}

function listOf<T extends Value>(
  value: Value,
  most: number,
  is: (item: Value) => item is T,
): T[] | undefined {
  return Array.isArray(value) && value.length <= most && value.every(is)
    ? (value as T[])
    : undefined;
}

function mapped<T>(
  map: ValueMap,
  item: (value: Value) => T | undefined,
): { [key: string]: T } | undefined {
  const result: { [key: string]: T } = Object.create(null);
  for (const [key, value] of Object.entries(map)) {
    const read = item(value);
    if (read === undefined || !isText(key)) return undefined;
    result[shown(key)] = read;
  }
  return result;
}

function plain(value: Value, depth: number): Plain | undefined {
  if (depth > MAX_NESTING) return undefined;
  if (typeof value === "bigint") {
    const number = Number(value);
    return Number.isSafeInteger(number) ? number : value;
  }
  if (typeof value === "string") return shown(value);
  if (Array.isArray(value)) {
    const items: Plain[] = [];
    for (const item of value) {
      const read = plain(item, depth + 1);
      if (read === undefined) return undefined;
      items.push(read);
    }
    return items;
  }
  return isMap(value) ? mapped(value, (item) => plain(item, depth + 1)) : value;
}

function binHeader(length: number): number[] {
  if (length < 2 ** 8) return [0xc4, length];
  if (length < 2 ** 16) return [0xc5, length >> 8, length & 0xff];
  return [0xc6, length >>> 24, (length >> 16) & 0xff, (length >> 8) & 0xff, length & 0xff];
}
