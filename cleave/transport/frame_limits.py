"""What may come in on a connection: WebSocket frames, seen as they arrive, before they are kept.

A peer announces a message's length before it sends it, and may send fragments without end, or
pings, none of which a session sees before a message is complete. So frames are looked at here: how
long a message becomes, how much of it lies here unfinished, how many frames there are that carry
nothing. Pure: bytes and times in; the connection cuts, and hands on what may go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cleave.protocol import limits
from cleave.protocol.allowance import Bucket

FRAMES_AT_ONCE: Final = 16
"""Frames that are handed on before the loop looks at its other connections."""

_CONTINUES: Final = 0
_CONTROL: Final = 8  # opcodes from here on
_SHORT, _LONG = 126, 127  # in place of a length: two bytes of it follow, or eight


class TooMuchError(Exception):
    """A peer sends more than it may; the reason is for people."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """The largest results that a session may send now.

    Attributes:
        work: of work that it was given.
        any: of that, of probes, and of runs whose cancellation may be on its way.
    """

    work: int = 0
    any: int = 0


def nothing() -> Awaited:
    """No result is awaited."""
    return Awaited()


class FrameGate:
    """Looks at the frames of one connection.

    Args:
        now_s: the time.

    Attributes:
        least_bytes: how long any message may be.
        awaited: asked for the results that may be longer.
    """

    def __init__(self, now_s: float) -> None:
        self.least_bytes = limits.MAX_HELLO_BYTES
        self.awaited: Callable[[], Awaited] = nothing
        self._empty = Bucket(limits.UNASKED_PER_S, limits.MAX_UNASKED, now_s)
        self._header = bytearray()
        self._left = 0  # of the present frame
        self._keeps = False  # whether that frame is of a message, and does not control
        self._ends = False  # whether its message does, with it
        self._here = 0  # of the present message, if it is not complete
        self._total = 0  # as far as it was announced
        self._may = 0  # how long it may become
        self._work: int | None = None  # the largest result of work, once that was asked for
        self._frames = 0

    def passes(self, data: bytes, at: int, now_s: float) -> int:
        """Up to where these bytes, from `at` on, may be handed on now.

        The others are to be shown again when the loop has looked at its other connections.

        Raises:
            TooMuchError: when the peer sends what it may not.
        """
        end, frames = len(data), 0
        while at < end:
            if self._left:
                step = min(self._left, end - at)
                at += step
                self._left -= step
                if self._keeps:
                    self._here += step
            else:
                at = self._read_header(data, at, now_s)
                if self._header:  # the rest of it is still to come
                    return at
            if not self._left:
                if self._keeps and self._ends:
                    self._here = 0
                frames += 1
                if frames == FRAMES_AT_ONCE:
                    return at
        return at

    def unasked_bytes(self) -> int:
        """What lies here of a message that is not complete, and is no result of work."""
        if not self._here:
            return 0
        if self._work is None:
            self._work = self.awaited().work
        return 0 if self._work and self._total <= self.least_bytes + self._work else self._here

    def _read_header(self, data: bytes, at: int, now_s: float) -> int:
        header, end = self._header, len(data)
        while at < end:
            missing = _header_bytes(header) - len(header)
            header += data[at : at + missing]
            at = min(end, at + missing)
            if len(header) == _header_bytes(header):
                self._begin(header, now_s)
                header.clear()
                break
        return at

    def _begin(self, header: bytearray, now_s: float) -> None:
        """A frame's header is complete."""
        kind, length = header[0] & 0x0F, header[1] & 0x7F
        if length == _SHORT:
            length = int.from_bytes(header[2:4], "big")
        elif length == _LONG:
            length = int.from_bytes(header[2:10], "big")
        self._left = length
        self._keeps = kind < _CONTROL
        self._ends = bool(header[0] & 0x80)
        if self._keeps:
            self._announced(length, begins=kind != _CONTINUES)
        free = limits.FREE_FRAMES + self._total // limits.FRAME_BYTES
        counts = not self._keeps or self._frames > free
        if counts and not self._empty.take(1, now_s):
            raise TooMuchError(
                f"it sent more than {limits.MAX_UNASKED} pings and tiny fragments, and "
                f"{limits.UNASKED_PER_S} a second after them"
            )

    def _announced(self, length: int, *, begins: bool) -> None:
        if begins:
            self._total = self._frames = self._here = 0
            self._may, self._work = self.least_bytes, None
        self._total += length
        self._frames += 1
        if self._frames > limits.MAX_FRAMES:
            raise TooMuchError(f"it sent a message in more than {limits.MAX_FRAMES} frames")
        if self._total > self._may:
            awaited = self.awaited()
            self._work = awaited.work
            self._may = min(limits.MAX_MESSAGE_BYTES, self.least_bytes + awaited.any)
            if self._total > self._may:
                raise TooMuchError(
                    f"it announced a message of {self._total} bytes or more, and the largest that "
                    f"is awaited may have {self._may}"
                )


def _header_bytes(header: bytearray) -> int:
    """How long a frame's header is, as far as its beginning tells."""
    if len(header) < 2:
        return 2
    length = header[1] & 0x7F
    extended = 2 if length == _SHORT else 8 if length == _LONG else 0
    return 2 + extended + (4 if header[1] & 0x80 else 0)


class Unfinished:
    """What lies here, over all connections, of messages that are not complete.

    Results of work are left out: how much of them is under way was decided when they were asked
    for. Of the others, when they are too much, who has held most for longest has to go: honest
    messages are short or on their way.

    Args:
        most_bytes: how much may lie here.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.total_bytes = 0
        self._held: dict[object, tuple[int, float]] = {}  # bytes, since when

    def holds(self, who: object, nbytes: int, now_s: float) -> object | None:
        """A connection holds so much now; returns one that has to be cut, if there is too much."""
        if not nbytes and who not in self._held:
            return None
        before, since_s = self._held.pop(who, (0, now_s))
        self.total_bytes += nbytes - before
        if nbytes:
            self._held[who] = nbytes, since_s
        if self.total_bytes <= self.most_bytes:
            return None
        return max(self._held, key=lambda key: self._weight(key, now_s))

    def _weight(self, who: object, now_s: float) -> tuple[float, int]:
        nbytes, since_s = self._held[who]
        return nbytes * (now_s - since_s), nbytes
