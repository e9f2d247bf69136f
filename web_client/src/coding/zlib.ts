/**
 * Zlib streams (RFC 1950) by pako, at once: browsers' own streams answer later, when messages that
 * came after may have been dealt with already, and cannot be told to write Huffman codes alone.
 */

import {
  deflate as packed,
  Z_FINISH,
  Z_HUFFMAN_ONLY,
  Z_STREAM_END,
  zlibInflate,
  zlibInflateInit2,
  ZStream,
} from "pako";
import { ProtocolError } from "../protocol/errors";

const WINDOW_BITS = 15; // a zlib stream, and no other

/** The stream of some bytes. Exponents have frequencies and no repetitions worth a search. */
export function deflate(data: Uint8Array): Uint8Array {
  return packed(data, { strategy: Z_HUFFMAN_ONLY, windowBits: WINDOW_BITS });
}

/**
 * Read a stream into an array that it must fill exactly. It takes no other memory, so no bomb can
 * be made of a stream.
 *
 * @throws ProtocolError when the bytes are not one whole stream of so many bytes
 */
export function inflate(data: Uint8Array, into: Uint8Array<ArrayBuffer>): void {
  const stream = new ZStream();
  zlibInflateInit2(stream, WINDOW_BITS);
  stream.input = data;
  stream.avail_in = data.length;
  stream.output = into;
  stream.avail_out = into.length;
  const status = zlibInflate(stream, Z_FINISH);
  if (status !== Z_STREAM_END || stream.avail_in > 0 || stream.avail_out > 0) {
    throw new ProtocolError(
      `a coded array cannot be inflated: ${stream.msg || `it is no whole stream of ${into.length} bytes`}`,
    );
  }
}
