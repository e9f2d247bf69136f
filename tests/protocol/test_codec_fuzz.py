"""Hostile bytes at the codec: a message that is written as it was read, or a ProtocolError."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from contextlib import nullcontext
from dataclasses import fields
from random import Random

import pytest

from cleave.errors import ProtocolError
from cleave.protocol import limits, messages
from cleave.protocol.codec import decode, encode
from cleave.protocol.messages import Role
from tests.fuzzing import STRANGE, TYPES, Mutator, decoded, with_field

INPUTS = 15_000


def _names(kind: str) -> list[str]:
    return [field.name for field in fields(TYPES[kind])]


def test_any_bytes_are_a_message_or_an_error() -> None:
    """Inputs that do something new are kept and mutated further."""
    mutator = Mutator(Random(2026))
    outcomes: Counter[str] = Counter()
    for _ in range(INPUTS):
        data = mutator.next()
        outcome = decoded(data)
        outcomes[outcome] += 1
        mutator.keep(data, outcome)
    read = sum(times for outcome, times in outcomes.items() if outcome.startswith("read"))
    assert INPUTS / 20 < read < INPUTS / 2, "neither all are refused nor hardly any"
    assert len(outcomes) > 60, "the inputs reach hardly anything"


@pytest.mark.parametrize("kind", sorted(TYPES))
def test_any_strange_value_in_any_field(kind: str) -> None:
    mutator = Mutator(Random(1))
    message = mutator.message_of(kind)
    for name in _names(kind):
        for value in STRANGE:
            decoded(with_field(message, name, value))


CLAIMS = {
    "text": b"\xdb\xff\xff\xff\xff",
    "bytes": b"\xc6\xff\xff\xff\xff",
    "list": b"\xdd\xff\xff\xff\xff",
    "map": b"\xdf\xff\xff\xff\xff",
    "extension": b"\xc9\xff\xff\xff\xff\x01",
    "longest list": b"\xdd\x00\x10\x00\x00",
    "largest map": b"\xdf\x00\x08\x00\x00",
    "lists in lists": b"\xdd\x00\x01\x00\x00" * 300,
}


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
@pytest.mark.parametrize("padding", [0, 10_000])
def test_a_length_that_lies_allocates_nothing(claim: bytes, padding: int) -> None:
    for kind in ("request", "drop", "put"):
        message = Mutator(Random(1)).message_of(kind)
        for name in _names(kind):
            data = with_field(message, name, claim, last=True) + b"\xc0" * padding
            tracemalloc.start()
            try:
                with pytest.raises(ProtocolError):
                    decode(data)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert peak < 100_000 + 20 * len(data), "what is there, not what is claimed"


@pytest.mark.parametrize("depth", [1, 100, 1000])
@pytest.mark.parametrize("claim", [b"\xdd\x00\x10\x00\x00", b"\xdc\xff\xff", b"\xdc\x0f\xff"])
@pytest.mark.parametrize("where", [b"", b"\x92", b"\x92\xa5hello", b"\x92\xa5hello\x81\xa1a"])
def test_lists_in_lists_set_nothing_aside(where: bytes, claim: bytes, depth: int) -> None:
    """Five kilobytes once were gigabytes: each list's room was made before its items were read."""
    data = where + claim * depth
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200_000


def test_a_hello_is_short_and_so_is_what_a_device_says() -> None:
    hello = messages.Hello(Role.DEVICE)
    spare = limits.MAX_HELLO_BYTES - len(b"".join(encode(hello)))
    for over, words in ((0, ""), (1, "a hello of 8193 bytes is over the limit of 8192")):
        text = "n" * ((spare + over) // 2 - 2)
        hello.name = text
        hello.profile = "p" * (spare + over - len(text) - 4)  # their headers have two bytes more
        with pytest.raises(ProtocolError, match=words) if words else nullcontext():
            assert len(b"".join(encode(hello))) == limits.MAX_HELLO_BYTES
    said = messages.Telemetry({f"{n:04}" * 256: 1.0 for n in range(64)})
    data = b"".join(encode(said))
    assert decode(data) == said
    with pytest.raises(ProtocolError, match="over the limit of 65536"):
        decode(data, limits.MAX_DEVICE_HEADER_BYTES)
