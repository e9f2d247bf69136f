/** Most additions before the sums are over 32 bits. */
const RUN = 5552;
const BASE = 65521;

/** The checksum of a zlib stream (RFC 1950), an unsigned 32-bit number. */
export function adler32(data: Uint8Array): number {
  let a = 1;
  let b = 0;
  for (let at = 0; at < data.length; at += RUN) {
    const end = Math.min(at + RUN, data.length);
    for (let i = at; i < end; i++) {
      a += data[i]!;
      b += a;
    }
    a %= BASE;
    b %= BASE;
  }
  return ((b << 16) | a) >>> 0;
}
