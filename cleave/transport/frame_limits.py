"""Limit received WebSocket frames, which are inspected before a message is complete.

The module checks announced message lengths, the bytes of incomplete messages, and the number of
tiny frames. It does no I/O. The caller passes in bytes and times, processes the allowed bytes, and
closes the connection when a limit is exceeded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cleave.protocol import limits
from cleave.protocol.allowance import Bucket

FRAMES_AT_ONCE: Final = 16  # frames of one connection before the event loop serves others

_CONTINUES: Final = 0
_CONTROL: Final = 8  # lowest opcode of a control frame
_SHORT, _LONG = 126, 127  # length codes: the next 2 or 8 bytes contain the length


class TooMuchError(Exception):
    """A peer sent more data than allowed. The message names the exceeded limit."""


@dataclass(frozen=True, slots=True)
class AwaitedSizes:
    """Sizes in bytes of the largest awaited task result (`work`) and result of any kind (`any`)."""

    work: int = 0
    any: int = 0


class FrameGate:
    """Inspects the frames that one connection receives.

    Attributes:
        least_bytes: maximum size of a message that is not an awaited result, in bytes.
        awaited: function that returns the sizes of awaited results. A message may exceed
            `least_bytes` by up to the size of the largest awaited result.
        data_bytes: number of bytes received in all messages, including an incomplete message.
    """

    def __init__(self, now_s: float) -> None:
        self.least_bytes = limits.MAX_HELLO_BYTES
        self.awaited: Callable[[], AwaitedSizes] = AwaitedSizes
        self.data_bytes = 0
        self._empty = Bucket(limits.UNASKED_PER_S, limits.MAX_UNASKED, now_s)
        self._header = bytearray()
        self._left = 0  # bytes of the current frame that are still missing
        self._keeps = False  # whether the current frame is part of a message (no control frame)
        self._ends = False  # whether the current frame is the last frame of its message
        self._here = 0  # received bytes of the current incomplete message
        self._total = 0  # announced bytes of the current message so far
        self._may = 0  # maximum bytes of the current message
        self._work: int | None = None  # largest task result; None until `awaited` was called
        self._frames = 0

    def passes(self, data: bytes, at: int, now_s: float) -> int:
        """Inspect up to `FRAMES_AT_ONCE` frames of `data[at:]`; return the index where they end.

        The caller may process the bytes before this index. For the remaining bytes, the caller must
        call this method again, after the event loop has served other connections.

        Raises:
            TooMuchError: if the peer exceeds a limit.
        """
        end, frames = len(data), 0
        while at < end:
            if self._left:
                step = min(self._left, end - at)
                at += step
                self._left -= step
                if self._keeps:
                    self._here += step
                    self.data_bytes += step
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
        """Return the incomplete message's received size in bytes; 0 if it may be a task result."""
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
        """Check the limits for a frame whose header is complete."""
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
                f"it sent too many pings and tiny fragments; the limit is {limits.MAX_UNASKED} at "
                f"once, then {limits.UNASKED_PER_S} per second"
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
                    f"it announced a message of at least {self._total} bytes, but the limit is "
                    f"{self._may} bytes"
                )


def _header_bytes(header: bytearray) -> int:
    """Return the full size in bytes of a partly received frame header; 2 if not yet known."""
    if len(header) < 2:
        return 2
    length = header[1] & 0x7F
    extended = 2 if length == _SHORT else 8 if length == _LONG else 0
    return 2 + extended + (4 if header[1] & 0x80 else 0)


class Unfinished:
    """Counts the bytes of incomplete messages over all connections, except awaited task results.

    Task results need no limit, because the PS decides how many to request. Above `most_bytes`, the
    connection whose incomplete message has the largest product of size and age must be closed.
    Messages of correct clients are small or quickly complete.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.total_bytes = 0
        self._held: dict[object, tuple[int, float]] = {}  # bytes and start time per connection

    def holds(self, who: object, nbytes: int, now_s: float) -> object | None:
        """Record an incomplete message's size; above the limit, return the connection to close."""
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
