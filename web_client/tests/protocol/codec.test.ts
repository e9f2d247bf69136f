import { describe, expect, test } from "vitest";
import { cleanText, decode, encode, shown } from "../../src/protocol/codec";
import { ProtocolError } from "../../src/protocol/errors";
import { Kind, make, type Message, Role, type Schema, SCHEMAS } from "../../src/protocol/messages";
import { bytesOf, type Hex, same, vectors } from "../vectors";

interface Written {
  name: string;
  type: string;
  fields: object;
  header?: Hex;
  bytes?: Hex;
  payload?: Hex;
}

function wholeBytes(vector: Written): Uint8Array {
  if (vector.bytes !== undefined) return bytesOf(vector.bytes);
  return bytesOf([vector.header ?? "", vector.payload ?? ""]);
}

function expectMessage(bytes: Uint8Array, vector: Written): void {
  const { payload, ...read } = decode(bytes) as { payload?: Uint8Array; type: string };
  expect(same(read)).toEqual(same({ type: vector.type, ...roundedCounts(vector) }));
  if (vector.payload === undefined) expect(payload).toBeUndefined();
  else expect(payload).toEqual(bytesOf(vector.payload));
}

/** The fields of a vector, with counts beyond 2^53 as this client reads them. */
function roundedCounts({ type, fields }: Written): object {
  const schema: Schema = SCHEMAS[type as Message["type"]];
  const rounded = (value: unknown): unknown => {
    if (Array.isArray(value)) return value.map(rounded);
    return typeof value === "bigint" ? Number(value) : value;
  };
  return Object.fromEntries(
    Object.entries(fields).map(([name, value]) => {
      const kind = schema.fields[name]?.kind ?? Kind.ID;
      return [name, [Kind.COUNT, Kind.SIZES].includes(kind) ? rounded(value) : value];
    }),
  );
}

describe("messages.json", () => {
  test.each(vectors<Written>("messages.json"))("$name", (vector) => {
    const bytes = wholeBytes(vector);
    expectMessage(bytes, vector);
    if (/^(fetch|run-graph)-largest/.test(vector.name)) return; // what is rounded is never sent
    expectMessage(encode(decode(bytes)), vector);
  });
});

describe("decode.json", () => {
  test.each(vectors<Written>("decode.json"))("$name", (vector) => {
    expectMessage(wholeBytes(vector), vector);
  });
});

describe("session.json", () => {
  test.each(vectors<Written>("session.json"))("$name", (vector) => {
    expectMessage(wholeBytes(vector), vector);
    expectMessage(encode(decode(wholeBytes(vector))), vector);
  });
});

describe("invalid.json", () => {
  test.each(vectors<{ name: string; bytes: Hex }>("invalid.json"))("$name", ({ bytes }) => {
    expect(() => decode(bytesOf(bytes))).toThrow(ProtocolError);
  });
});

test("a payload is a view of the message, wherever it lies", () => {
  const message = encode({
    type: "put",
    id: 1n,
    rows: 1,
    columns: 2,
    dtype: "bf16",
    payload: Uint8Array.of(1, 2, 3, 4),
  });
  const shifted = new Uint8Array(message.length + 3).subarray(3);
  shifted.set(message);
  const read = decode(shifted);
  expect(read.type === "put" && read.payload.buffer === shifted.buffer).toBe(true);
});

test("a count beyond 32 bits is written as an integer", () => {
  const [first] = vectors<Written>("messages.json");
  const phone = decode(wholeBytes(first as Written));
  if (phone.type !== "hello") throw new Error("the first vector is no hello any more");
  const hello = decode(encode({ ...phone, memory_bytes: 2 ** 40 }));
  expect(hello.type === "hello" && hello.memory_bytes).toBe(2 ** 40);
});

test("nested claims set no memory aside", () => {
  const bomb = Uint8Array.from([0x92, ...Array(500).fill([0xdd, 0, 0x0f, 0xff, 0xff]).flat()]);
  expect(() => decode(bomb)).toThrow(ProtocolError);
});

test("what a peer says can be shown as it is read; secrets stay as they are", () => {
  const dirty = "a\u001b[2Jb\r\nc\u202ed\u2066e\u0000\u009bf\u200bg\u2028h";
  const tidy = "a[2Jb  cdefg h";
  const hello = make("hello", { role: Role.DEVICE, version: 1, name: dirty, credential: dirty });
  expect(decode(encode(hello))).toMatchObject({ name: tidy, credential: dirty });
  const reply = make("reply", { id: 1n, ok: true, data: { [dirty]: [{ x: dirty }] } });
  const read = decode(encode(reply));
  expect(read.type === "reply" && same(read.data)).toEqual({ [tidy]: [{ x: tidy }] });
  for (const text of ["plain", "Łukasz’ 📱 日本", ""]) expect(shown(text)).toBe(text);
});

test("no error shows what a message held", () => {
  const secret = "s3cr3t";
  const wrong = { ...make("hello", { role: Role.DEVICE, version: 1 }), join_code: [secret] };
  const bytes = encode(wrong as unknown as Message);
  expect(() => decode(bytes)).toThrow(/join_code/);
  expect(() => decode(bytes)).not.toThrow(new RegExp(secret));
});

test("texts are made such that every receiver takes them", () => {
  expect(cleanText("a\ud800b")).toBe("a\ufffdb");
  expect(Array.from(cleanText("😀".repeat(5000)))).toHaveLength(4096);
});
