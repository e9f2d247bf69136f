/**
 * As much of protobuf's encoding as ONNX models need: fields read in place, and written.
 *
 * A message is a row of fields. Each has a number and a value: an integer, or bytes, which may be a
 * message again. Which it is says the format that the message is of, not its bytes.
 */

/** Bytes are not a message. */
export class ProtobufError extends Error {}

/** What a field holds; what has a fixed length, as floats, is bytes here. */
export type FieldValue = number | Uint8Array;

const VARINT = 0;
const FIXED_64 = 1;
const BYTES = 2;
const FIXED_32 = 5;
const LONGEST_VARINT = 10; // bytes, for 64 bits
const LARGEST_NUMBER = 2 ** 29 - 1; // beyond it readers disagree about which field it is

/**
 * A message's fields in order. Values are views of it: nothing is copied. Integers beyond 2^53 lose
 * their last digits.
 *
 * @throws ProtobufError where the bytes are no fields, or groups, which only old formats have
 */
export function fields(message: Uint8Array): Generator<readonly [number, FieldValue]> {
  return allFields(message, false);
}

/** The same, of which integers are those with a sign that have these bits. */
export function signedFields(message: Uint8Array): Generator<readonly [number, FieldValue]> {
  return allFields(message, true);
}

function* allFields(
  message: Uint8Array,
  signed: boolean,
): Generator<readonly [number, FieldValue]> {
  let at = 0;
  while (at < message.length) {
    const key = varint(message, at);
    at = key.end;
    const number = Math.floor(key.value / 8);
    const wire = key.value % 8;
    if (number < 1 || number > LARGEST_NUMBER) {
      throw new ProtobufError(`a field at byte ${at} has the number ${number}`);
    }
    let length: number;
    if (wire === VARINT) {
      const { value, signed: below, end } = varint(message, at);
      at = end;
      yield [number, signed ? below : value];
      continue;
    } else if (wire === BYTES) {
      ({ value: length, end: at } = varint(message, at));
    } else if (wire === FIXED_64 || wire === FIXED_32) {
      length = wire === FIXED_64 ? 8 : 4;
    } else {
      throw new ProtobufError(`field ${number} at byte ${at} is of an unknown kind, ${wire}`);
    }
    if (length > message.length - at) {
      throw new ProtobufError(`field ${number} at byte ${at} ends after its message`);
    }
    yield [number, message.subarray(at, at + length)];
    at += length;
  }
}

/**
 * The integers of a repeated field, from 0 on, that is one integer or many, packed.
 *
 * @throws ProtobufError where the bytes are no integers
 */
export function* integers(value: FieldValue): Generator<number> {
  if (typeof value === "number") {
    yield value;
    return;
  }
  let at = 0;
  while (at < value.length) {
    const found = varint(value, at);
    at = found.end;
    yield found.value;
  }
}

/**
 * The same as numbers with a sign, that may be below 0. Those beyond 2^53 lose their last digits.
 *
 * @param value a field's value as `signedFields` yields it
 */
export function* signedIntegers(value: FieldValue): Generator<number> {
  if (typeof value === "number") {
    yield value;
    return;
  }
  let at = 0;
  while (at < value.length) {
    const found = varint(value, at);
    at = found.end;
    yield found.signed;
  }
}

/** An integer of 64 bits without a sign, the same with one, and where it ends. */
function varint(message: Uint8Array, at: number): { value: number; signed: number; end: number } {
  let value = 0;
  let missing = 0; // to 2^64 - 1, exact where the integer is a small one below 0
  for (let place = 0; place < LONGEST_VARINT && at + place < message.length; place++) {
    const byte = message[at + place] as number;
    // Of the last byte one bit is left: the others would be beyond 64.
    const bits = place === LONGEST_VARINT - 1 ? 1 : 0x7f;
    value += (byte & bits) * 2 ** (7 * place);
    missing += (bits - (byte & bits)) * 2 ** (7 * place);
    if (byte < 0x80) {
      const below = place === LONGEST_VARINT - 1 && (byte & 1) === 1;
      return { value, signed: below ? -missing - 1 : value, end: at + place + 1 };
    }
  }
  throw new ProtobufError(`an integer at byte ${at} does not end`);
}

/** A field that is an integer, from -1 to 2^53. */
export function integer(number: number, value: number): number[] {
  const bytes = written(number * 8 + VARINT);
  return bytes.concat(value < 0 ? [...Array(9).fill(0xff), 1] : written(value)); // -1 in 64 bits
}

/** A field that is a text, bytes, or a message whose fields are the parts. */
export function content(number: number, ...parts: (readonly number[] | string)[]): number[] {
  const held = parts.flatMap((part) =>
    typeof part === "string" ? [...new TextEncoder().encode(part)] : part,
  );
  return [...written(number * 8 + BYTES), ...written(held.length), ...held];
}

function written(value: number): number[] {
  const bytes: number[] = [];
  let rest = value;
  for (; rest >= 0x80; rest = Math.floor(rest / 0x80)) bytes.push((rest % 0x80) | 0x80);
  return [...bytes, rest];
}
