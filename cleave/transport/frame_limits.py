"""Limits on what a connection receives: WebSocket frames, inspected as they arrive.

A peer announces a message's length before it sends it, and may send any number of fragments or
pings. A session sees none of these before a message is complete. So frames are inspected here: how
long a message becomes, how much of it is stored unfinished, and how many frames carry nothing.
Pure: it takes bytes and times; the connection closes itself and passes on what may pass.
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
_SHORT, _LONG = 126, 127  # codes for a length in the next two bytes, or eight


class TooMuchError(Exception):
    """A peer sends more than it may; the text says what, for people."""


@dataclass(frozen=True, slots=True)
class AwaitedSizes:
    """The size of the largest results that a session may send now, in bytes.

    Attributes:
        work: the largest result of a task that it was given.
        any: the largest result of those, of probes, and of runs whose cancellation may still be
            under way.
    """

    work: int = 0
    any: int = 0


def nothing() -> AwaitedSizes:
    """Return that no result is awaited."""
    return AwaitedSizes()


class FrameGate:
    """The inspection of the frames of one connection.

    Args:
        now_s: the time, in seconds.

    Attributes:
        least_bytes: how long any message may be, in bytes.
        awaited: returns the sizes of results, which may be longer.
    """

    def __init__(self, now_s: float) -> None:
        self.least_bytes = limits.MAX_HELLO_BYTES
        self.awaited: Callable[[], AwaitedSizes] = nothing
        self._empty = Bucket(limits.UNASKED_PER_S, limits.MAX_UNASKED, now_s)
        self._header = bytearray()
        self._left = 0  # bytes of the present frame that are still to come
        self._keeps = False  # whether that frame is part of a message, not a control frame
        self._ends = False  # whether that frame is the last of its message
        self._here = 0  # bytes stored of the present message, if it is incomplete
        self._total = 0  # bytes of it that were announced so far
        self._may = 0  # bytes that it may have at most
        self._work: int | None = None  # the largest result of a task, once `awaited` was called
        self._frames = 0

    def passes(self, data: bytes, at: int, now_s: float) -> int:
        """Return the end of the part of these bytes, from `at` on, that may be passed on now.

        The rest must be given again after the loop has looked at its other connections.

        Raises:
            TooMuchError: when the peer sends more than it may.
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
        """Return the stored bytes of an incomplete message that is not a result of a task."""
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
        """Handle a complete frame header."""
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
    """Return the length of a frame's header, as far as its first bytes tell."""
    if len(header) < 2:
        return 2
    length = header[1] & 0x7F
    extended = 2 if length == _SHORT else 8 if length == _LONG else 0
    return 2 + extended + (4 if header[1] & 0x80 else 0)


class Unfinished:
    """The size of incomplete messages, over all connections.

    Results of tasks do not count: how much of them is under way was decided when the runs were
    sent. If the others exceed the limit, the connection with the largest product of bytes and time
    is cut: messages of honest clients are short, or are still arriving.

    Args:
        most_bytes: the limit, in bytes.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.total_bytes = 0
        self._held: dict[object, tuple[int, float]] = {}  # bytes, since when

    def holds(self, who: object, nbytes: int, now_s: float) -> object | None:
        """Note how many bytes a connection holds now; return one that must be cut, or None."""
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
