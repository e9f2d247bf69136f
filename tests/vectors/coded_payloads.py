"""The vectors of `coding.json`: payloads with their coded form, and bytes that are none.

Streams are put together here by hand, since releases of zlib differ in the bytes that they write.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Sequence
from typing import Any, Final

from cleave.protocol.limits import CODED_CHUNK

Json = dict[str, Any]

_HEAD: Final = b"\x78\x01"  # zlib's: deflate, a window of 32 kB, no dictionary
_STORED: Final = 65535  # bytes of the largest block that is stored


def stored(data: bytes) -> bytes:
    """A zlib stream in which bytes are stored as they are."""
    blocks = [data[at : at + _STORED] for at in range(0, len(data), _STORED)] or [b""]
    body = b"".join(
        struct.pack("<BHH", block is blocks[-1], len(block), len(block) ^ 0xFFFF) + block
        for block in blocks
    )
    return _HEAD + body + _checksum(data)


def fixed(symbols: Sequence[int]) -> bytes:
    """A zlib stream with deflate's fixed Huffman codes: of these bytes."""
    bits = "110" + "".join(map(_fixed_code, symbols)) + "0000000"
    return _HEAD + _packed(bits) + _checksum(bytes(symbols))


def _fixed_code(symbol: int) -> str:
    return f"{0x30 + symbol:08b}" if symbol < 144 else f"{0x190 + symbol - 144:09b}"


def _packed(bits: str) -> bytes:
    """Bits as bytes, the first one lowest."""
    whole = bits + "0" * (-len(bits) % 8)
    return bytes(int(whole[at : at + 8][::-1], 2) for at in range(0, len(whole), 8))


def _checksum(data: bytes) -> bytes:
    return zlib.adler32(data).to_bytes(4, "big")


def _chunk(stream: bytes, *plain: bytes) -> bytes:
    return struct.pack("<I", len(stream)) + stream + b"".join(plain)


CODED: Final = _chunk(fixed(b"\x7f\x80"), b"\x00\x01")
"""1 and -2 as bf16."""

_SOME: Final = (b"\x7e\x7d" * 5 + b"\x7c" * 30) * 6
_OWN_CODES: Final = bytes.fromhex(
    "780105c1010100000082a0e3d8f660adb516000000b0d65a0b000000586bad05000000acb5d602000000d65a6b0100"
    "00006badb50000008003ebec749b"
)
"""`_SOME` with Huffman codes of its own and nothing else, as Python's zlib wrote it."""
_COPIES: Final = bytes.fromhex(
    "78017dc10101000008c3a0e267d96d202449f64a92ec9524d92b49b2579264af24c95e07ebec749b"
)
"""`_SOME` with Huffman codes of its own, and copies of what came before."""


_OFTEN: Final = re.compile(rb"(.{1,4}?)\1{63,}", re.DOTALL)


def _runs(data: bytes) -> Any:
    """Bytes in which up to four are repeated often, written short."""
    parts: list[Any] = []
    at = 0
    for found in _OFTEN.finditer(data):
        parts.append(data[at : found.start()].hex())
        parts.append({"hex": found[1].hex(), "times": len(found[0]) // len(found[1])})
        at = found.end()
    parts.append(data[at:].hex())
    parts = [part for part in parts if part]
    return parts if len(parts) > 1 else parts[0] if parts else ""


def coding_vectors() -> list[Json]:
    """The vectors of `coding.json`."""
    ones = CODED_CHUNK + 1
    good: list[tuple[str, str, str, bytes, bytes]] = [
        ("empty", "no element, no chunk", "bf16", b"", b""),
        (
            "bf16",
            "1 and -2: exponents 7f and 80, fractions and signs 00 and 01",
            "bf16",
            bytes.fromhex("803f00c0"),
            CODED,
        ),
        (
            "bf16-special",
            "0, -0, infinity, -infinity, a NaN with a sign, the least number above 0",
            "bf16",
            bytes.fromhex("00000080807f80ffc1ff0100"),
            _chunk(fixed(b"\x00\x00\xff\xff\xff\x00"), b"\x00\x01\x00\x01\x83\x02"),
        ),
        (
            "fp16",
            "1 and -2: the same turn of the same 16 bits",
            "fp16",
            bytes.fromhex("003c00c0"),
            _chunk(fixed(b"\x78\x80"), b"\x00\x01"),
        ),
        (
            "fp32",
            "1 and -3.1415927: upper halves as bf16, then the lower halves 0000 and 0fdb",
            "fp32",
            bytes.fromhex("0000803fdb0f49c0"),
            _chunk(fixed(b"\x7f\x80"), b"\x00\x93", bytes.fromhex("0000db0f")),
        ),
        (
            "stored",
            "a stream may store its bytes",
            "bf16",
            bytes.fromhex("803f00c0"),
            _chunk(stored(b"\x7f\x80"), b"\x00\x01"),
        ),
        (
            "codes-of-its-own",
            "Huffman codes alone, as senders use them",
            "bf16",
            b"".join(struct.pack("<H", exponent << 7) for exponent in _SOME),
            _chunk(_OWN_CODES, bytes(len(_SOME))),
        ),
        (
            "copies",
            "a reader takes every zlib stream, also one that copies what came before",
            "bf16",
            b"".join(struct.pack("<H", exponent << 7) for exponent in _SOME),
            _chunk(_COPIES, bytes(len(_SOME))),
        ),
        (
            "two-chunks",
            "one element more than a chunk has",
            "bf16",
            b"\x80\x3f" * ones,
            _chunk(stored(b"\x7f" * CODED_CHUNK), bytes(CODED_CHUNK))
            + _chunk(fixed(b"\x7f"), b"\x00"),
        ),
        (
            "two-chunks-fp32",
            "likewise; each chunk has its own lower halves",
            "fp32",
            b"\x00\x00\x80\x3f" * ones,
            _chunk(stored(b"\x7f" * CODED_CHUNK), bytes(3 * CODED_CHUNK))
            + _chunk(fixed(b"\x7f"), bytes(3)),
        ),
    ]  # fmt: skip
    two, whole = fixed(b"\x7f\x80"), CODED
    bad: list[tuple[str, str, str, int, bytes]] = [
        ("nothing", "no byte for two elements", "bf16", 4, b""),
        ("cut-in-length", "three bytes of a length", "bf16", 4, whole[:3]),
        ("cut-in-stream", "five bytes of a stream", "bf16", 4, whole[:9]),
        ("cut-at-the-end", "the last fraction is missing", "bf16", 4, whole[:-1]),
        ("byte-too-many", "one byte follows", "bf16", 4, whole + b"\x00"),
        ("bytes-for-nothing", "a chunk where there is no element", "bf16", 0, whole),
        ("length-lies", "a stream of 2**32 - 1 bytes", "bf16", 4, b"\xff" * 4 + whole[4:]),
        ("odd-size", "3 bytes are no bf16 array", "bf16", 3, whole),
        ("too-large", "an array of 2**62 bytes", "bf16", 2**62, whole),
        ("exponent-missing", "one of two", "bf16", 4, _chunk(fixed(b"\x7f"), b"\x00\x01")),
        ("exponent-too-many", "three of two", "bf16", 4, _chunk(fixed(b"\x7f" * 3), b"\x00\x01")),
        ("bomb", "65536 exponents of two", "bf16", 4, _chunk(stored(bytes(65536)), b"\x00\x01")),
        ("checksum-wrong", "its last byte is", "bf16", 4, _chunk(two[:-1] + b"\xff", b"\x00\x01")),
        ("checksum-missing", "the stream ends before it", "bf16", 4, _chunk(two[:-4], b"\x00\x01")),
        ("byte-behind-stream", "in its length", "bf16", 4, _chunk(two + b"\x00", b"\x00\x01")),
        ("stream-twice", "in one length", "bf16", 4, _chunk(two + two, b"\x00\x01")),
        ("no-zlib", "deflate without zlib's head", "bf16", 4, _chunk(two[2:-4], b"\x00\x01")),
        ("dictionary", "the head names one", "bf16", 4,
         _chunk(b"\x78\x20" + _checksum(b"a") + two[2:], b"\x00\x01")),
        ("other-dtype", "fp32 has lower halves as well", "fp32", 8, whole),
    ]  # fmt: skip
    found: list[Json] = [
        {
            "name": name,
            "about": about,
            "dtype": dtype,
            "coded": _runs(coded),
            "payload_bytes": len(payload),
            "payload": _runs(payload),
        }
        for name, about, dtype, payload, coded in good
    ]
    found += [
        {"name": name, "about": about, "dtype": dtype, "coded": _runs(coded), "payload_bytes": n}
        for name, about, dtype, n, coded in bad
    ]
    return found
