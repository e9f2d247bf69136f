"""What may come in on a connection: frames as the WebSocket library writes them, in any pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode

from cleave.protocol import limits
from cleave.transport.frame_limits import (
    FRAMES_AT_ONCE,
    AwaitedSizes,
    FrameGate,
    TooMuchError,
    Unfinished,
)

MARGIN = limits.MAX_DEVICE_HEADER_BYTES


def frame(nbytes: int, kind: Opcode = Opcode.BINARY, *, fin: bool = True) -> bytes:
    return Frame(kind, bytes(nbytes), fin).serialize(mask=True)


def announced(nbytes: int) -> bytes:
    """The header of a frame, without what it announces."""
    return b"\x82\xff" + nbytes.to_bytes(8, "big") + bytes(4)


def admitted(awaited: AwaitedSizes | None = None, now_s: float = 0.0) -> FrameGate:
    gate = FrameGate(now_s)
    gate.least_bytes = MARGIN
    gate.awaited = lambda: awaited or AwaitedSizes()
    return gate


def show(gate: FrameGate, data: bytes, now_s: float = 0.0) -> int:
    """Show bytes as often as it takes; returns in how many turns they were handed on."""
    at, turns = 0, 0
    while at < len(data):
        at, turns = gate.passes(data, at, now_s), turns + 1
    return turns


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 125, 126, 65535, 65536]), st.integers(1, 4))),
    st.lists(st.integers(1, 70_000), min_size=1),
)
def test_messages_in_any_pieces_are_handed_on_and_counted(
    messages: list[tuple[int, int]], cuts: list[int]
) -> None:
    gate = admitted(AwaitedSizes(0, 4 * 65536))
    data = b""
    for nbytes, frames in messages:
        for number in range(frames):
            kind = Opcode.CONT if number else Opcode.BINARY
            data += frame(nbytes, kind, fin=number == frames - 1)
            data += frame(7, Opcode.PING)  # between the fragments of a message, as may be
    at = 0
    for number in range(len(data)):
        piece = data[at : at + cuts[number % len(cuts)]]
        if not piece:
            break
        show(gate, piece)
        at += len(piece)
    assert gate.unasked_bytes() == 0
    data_bytes = sum(nbytes * frames for nbytes, frames in messages)
    assert gate.data_bytes == data_bytes
    gate.passes(frame(100, fin=False), 0, 0.0)
    assert gate.unasked_bytes() == 100
    assert gate.data_bytes == data_bytes + 100


def test_only_so_long_a_message_is_let_in_as_is_awaited() -> None:
    for awaited, most in [
        (AwaitedSizes(), MARGIN),
        (AwaitedSizes(10**6, 10**6), MARGIN + 10**6),
        (AwaitedSizes(0, 10**7), MARGIN + 10**7),
        (AwaitedSizes(2**40, 2**40), limits.MAX_MESSAGE_BYTES),
    ]:
        admitted(awaited).passes(announced(most), 0, 0.0)
        with pytest.raises(TooMuchError, match=f"limit is {most} bytes"):
            admitted(awaited).passes(announced(most + 1), 0, 0.0)
    with pytest.raises(TooMuchError, match=f"limit is {limits.MAX_HELLO_BYTES} bytes"):
        FrameGate(0.0).passes(announced(limits.MAX_HELLO_BYTES + 1), 0, 0.0)


def test_fragments_count_together_and_what_is_awaited_may_change_meanwhile() -> None:
    gate = admitted()
    show(gate, frame(MARGIN, fin=False))
    with pytest.raises(TooMuchError):
        gate.passes(frame(2000, Opcode.CONT, fin=False), 0, 0.0)
    gate = admitted()
    show(gate, frame(MARGIN, fin=False))
    gate.awaited = lambda: AwaitedSizes(5000, 5000)
    show(gate, frame(2000, Opcode.CONT))
    assert gate.unasked_bytes() == 0


def test_results_of_work_are_no_burden_and_others_are() -> None:
    for awaited, nbytes, counted in [
        (AwaitedSizes(10**6, 10**6), 50_000, 0),  # may well be that result
        (AwaitedSizes(10**6, 10**6), 500_000, 0),
        (AwaitedSizes(1, 10**6), 500_000, 500_000),  # of a probe
        (AwaitedSizes(), 50_000, 50_000),
    ]:
        gate = admitted(awaited)
        show(gate, frame(nbytes, fin=False))
        assert gate.unasked_bytes() == counted


@pytest.mark.parametrize(
    "kind",
    [frame(0, Opcode.PING), frame(125, Opcode.PONG), frame(0, Opcode.CONT, fin=False)],
    ids=["pings", "pongs", "fragments"],  # their bytes are masked with random ones
)
def test_frames_that_carry_nothing_are_counted(kind: bytes) -> None:
    def counted(more: int, now_s: float) -> None:
        gate = admitted(now_s=100.0)
        show(gate, frame(0, fin=False), 100.0)
        if kind[0] & 0x0F == Opcode.CONT:
            show(gate, kind * (limits.FREE_FRAMES - 1), 100.0)
        show(gate, kind * limits.MAX_UNASKED, 100.0)
        show(gate, kind * more, now_s)

    counted(0, 100.0)
    counted(limits.UNASKED_PER_S, 101.0)
    for more, now_s in [(1, 100.0), (limits.UNASKED_PER_S + 1, 101.0)]:
        with pytest.raises(TooMuchError, match="pings and tiny fragments"):
            counted(more, now_s)


def test_browsers_may_cut_messages_where_they_like() -> None:
    """A tiny piece of every large message, and several of every small one: at no rate a flood."""
    gate = admitted(AwaitedSizes(10**8, 10**8))
    large = frame(1, fin=False) + frame(65536, Opcode.CONT, fin=False) + frame(3, Opcode.CONT)
    small = frame(1, fin=False) + frame(0, Opcode.CONT, fin=False) * 10 + frame(3, Opcode.CONT)
    show(gate, (large + small) * 2000)


def test_pieces_of_a_kilobyte_are_not_counted_but_bounded() -> None:
    gate = admitted(AwaitedSizes(10**8, 10**8))
    piece = frame(limits.FRAME_BYTES, Opcode.CONT, fin=False)
    show(gate, frame(limits.FRAME_BYTES, fin=False) + piece * (limits.MAX_FRAMES - 1))
    with pytest.raises(TooMuchError, match="frames"):
        show(gate, piece)


def test_many_frames_are_handed_on_a_few_at_a_time() -> None:
    assert show(admitted(), frame(13) * 1000) == -(-1000 // FRAMES_AT_ONCE)
    assert show(admitted(), frame(60_000) * FRAMES_AT_ONCE) == 1


def test_of_too_much_unfinished_who_holds_most_for_longest_goes() -> None:
    lies_here = Unfinished(most_bytes=1000)
    assert lies_here.holds("slow", 100, 0.0) is None
    assert lies_here.holds("stuck", 600, 1.0) is None
    assert lies_here.holds("quick", 300, 9.0) is None
    assert lies_here.holds("quick", 400, 9.1) == "stuck"
    assert lies_here.holds("stuck", 0, 9.1) is None
    assert lies_here.holds("nobody", 0, 9.1) is None
    assert lies_here.total_bytes == 500
    assert lies_here.holds("quick", 0, 9.2) is None
    assert lies_here.holds("slow", 0, 9.2) is None
    assert lies_here.total_bytes == 0
