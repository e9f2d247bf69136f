"""Limits on received WebSocket frames, inspected as they arrive.

A session only sees complete messages. So this module checks announced message lengths, the bytes of
incomplete messages, and the number of tiny frames. Pure: it takes bytes and times. The connection
closes itself and passes on the allowed bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cleave.protocol import limits
from cleave.protocol.allowance import Bucket

FRAMES_AT_ONCE: Final = 16
"""Frames passed on before the loop serves its other connections."""

_CONTINUES: Final = 0
_CONTROL: Final = 8  # control frames have this opcode or above
_SHORT, _LONG = 126, 127  # the length is in the next 2 or 8 bytes


class TooMuchError(Exception):
    """A peer sends more than it may; the text says what, for people."""


@dataclass(frozen=True, slots=True)
class AwaitedSizes:
    """Sizes of the largest results that a session may send now, in bytes.

    Attributes:
        work: size of the largest result of its tasks.
        any: size of the largest result, also of probes and of runs that are being cancelled.
    """

    work: int = 0
    any: int = 0


def nothing() -> AwaitedSizes:
    """Return sizes for no awaited result."""
    return AwaitedSizes()


class FrameGate:
    """Inspects the frames of one connection.

    Args:
        now_s: current time, in seconds.

    Attributes:
        least_bytes: length that any message may have, in bytes.
        awaited: returns the sizes of awaited results, which may be longer.
    """

    def __init__(self, now_s: float) -> None:
        self.least_bytes = limits.MAX_HELLO_BYTES
        self.awaited: Callable[[], AwaitedSizes] = nothing
        self._empty = Bucket(limits.UNASKED_PER_S, limits.MAX_UNASKED, now_s)
        self._header = bytearray()
        self._left = 0  # missing bytes of the current frame
        self._keeps = False  # whether that frame is part of a message, not a control frame
        self._ends = False  # whether that frame is the last of its message
        self._here = 0  # stored bytes of the current message, if incomplete
        self._total = 0  # announced bytes of that message so far
        self._may = 0  # maximum bytes of that message
        self._work: int | None = None  # largest task result, once `awaited` was called
        self._frames = 0

    def passes(self, data: bytes, at: int, now_s: float) -> int:
        """Return the end of the bytes, from `at` on, that may be passed on now.

        Give the rest again after the loop has served its other connections.

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
                if self._header:  # the header is incomplete
                    return at
            if not self._left:
                if self._keeps and self._ends:
                    self._here = 0
                frames += 1
                if frames == FRAMES_AT_ONCE:
                    return at
        return at

    def unasked_bytes(self) -> int:
        """Return the stored bytes of an incomplete message other than a task result."""
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
    """Return the length of a frame's header, as far as its first bytes show."""
    if len(header) < 2:
        return 2
    length = header[1] & 0x7F
    extended = 2 if length == _SHORT else 8 if length == _LONG else 0
    return 2 + extended + (4 if header[1] & 0x80 else 0)


class Unfinished:
    """Total size of incomplete messages over all connections, without task results.

    Sending runs already limited how many results arrive. Over the limit, the connection with the
    largest product of bytes and time is cut: honest messages are short or still arriving.

    Args:
        most_bytes: limit, in bytes.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.total_bytes = 0
        self._held: dict[object, tuple[int, float]] = {}  # bytes, since when

    def holds(self, who: object, nbytes: int, now_s: float) -> object | None:
        """Set the bytes that a connection holds now; return a connection to cut, or None."""
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
