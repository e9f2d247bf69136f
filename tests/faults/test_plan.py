"""Which faults happen: the same for the same seed, and what they do to a message."""

from __future__ import annotations

import random

from cleave.arrays import Buffer, empty
from cleave.arrays import DType as D
from cleave.errors import ProtocolError
from cleave.protocol import messages
from cleave.protocol.codec import decode, encode
from tests.faults.plan import (
    BURST_BYTES,
    Direction,
    Fault,
    RandomFaults,
    Seen,
    spoiled_header,
    spoiled_payload,
    truncated,
)
from tests.faults.proxy import look

CHANCES = {Fault.DROP: 0.1, Fault.DELAY: 0.2, Fault.CORRUPT_PAYLOAD: 0.1}


def seen(index: int, direction: Direction = Direction.UP, size_bytes: int = 1000) -> Seen:
    return Seen(direction, index, "result", size_bytes, 50)


def drawn(seed: int, connection: int, directions: list[Direction]) -> list[Fault | None]:
    faults = RandomFaults(seed, connection, CHANCES)
    return [faults.decide(seen(i, direction)) for i, direction in enumerate(directions)]


def test_faults_are_drawn_from_seed_connection_and_direction() -> None:
    ups = [Direction.UP] * 1000
    assert drawn(1, 1, ups) == drawn(1, 1, ups)
    assert drawn(1, 1, ups) != drawn(2, 1, ups)
    assert drawn(1, 1, ups) != drawn(1, 2, ups)
    assert drawn(1, 1, ups) != drawn(1, 1, [Direction.DOWN] * 1000)
    # What goes the other way meanwhile changes nothing.
    mixed = [direction for _ in ups for direction in Direction]
    both = drawn(1, 1, mixed)
    assert both[mixed.index(Direction.UP) :: 2] == drawn(1, 1, ups)


def test_only_what_has_a_payload_gets_a_spoiled_one() -> None:
    always = RandomFaults(0, 1, {Fault.CORRUPT_PAYLOAD: 1.0})
    assert always.decide(seen(0, size_bytes=50 + BURST_BYTES - 1)) is None
    assert always.decide(seen(1, size_bytes=50 + BURST_BYTES)) is Fault.CORRUPT_PAYLOAD


def message() -> bytes:
    block = empty(8, 8, D.FP32)
    block.array[...] = 1
    return b"".join(encode(messages.Result(7, 8, 8, "fp32", 0.1, Buffer(block.array, D.FP32))))


def test_a_message_is_read_as_the_protocol_writes_it() -> None:
    assert look(message()) == ("result", len(message()) - 8 * 8 * 4)
    run = b"".join(encode(messages.Run(1, "matmul", (1, 2), False, False, "fp32")))
    assert look(run) == ("run", len(run))
    assert look(b"\xc1nothing") == ("", 8)
    assert look(b"") == ("", 0)


def test_damage_is_where_it_is_said_to_be() -> None:
    whole = message()
    _, header_bytes = look(whole)
    for seed in range(200):
        rng = random.Random(seed)
        payload = spoiled_payload(whole, header_bytes, rng)
        assert payload[:header_bytes] == whole[:header_bytes]
        assert payload != whole
        assert len(payload) == len(whole)
        header = spoiled_header(whole, header_bytes, rng)
        assert header[header_bytes:] == whole[header_bytes:]
        assert sum(x != y for x, y in zip(header, whole, strict=True)) == 1
        shorter = truncated(whole, rng)
        assert whole.startswith(shorter)
        assert len(shorter) < len(whole)
        try:
            decode(shorter)
        except ProtocolError:
            continue
        raise AssertionError("a truncated message was accepted")
