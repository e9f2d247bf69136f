"""A delayed link: carries packets between two TUN interfaces, each some milliseconds late.

    python -m benchmarks.delayed_link HERE THERE DELAY_S

Makes both interfaces, prints `ready`, and carries packets until it is ended, which removes the
interfaces. They may be moved to network namespaces in the meantime. Packets keep their order. Rates
are limited by the interfaces' queueing disciplines. Linux's `netem` does the same, but many small
kernels, such as those of virtual machines, lack it.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Final

MTU: Final = 16_000
"""Bytes per packet, below the burst of a link's queueing discipline, which drops longer packets."""

_TUNSETIFF: Final = 0x400454CA
_IFF_TUN: Final = 0x0001
_IFF_NO_PI: Final = 0x1000  # no header before a packet
_AT_ONCE: Final = 64  # packets read before others are delivered
_PRIORITY: Final = -15  # above processes that compute on the same cores


class Delay:
    """Packets in flight in one direction, oldest first.

    Args:
        delay_s: delay of each packet in seconds.
        write: function called with each packet that arrives.
    """

    def __init__(self, delay_s: float, write: Callable[[bytes], object]) -> None:
        self._delay_s = delay_s
        self._write = write
        self._packets: deque[tuple[float, bytes]] = deque()

    def take(self, packet: bytes, now_s: float) -> None:
        """Add a packet that departs at `now_s`."""
        self._packets.append((now_s + self._delay_s, packet))

    def deliver(self, now_s: float) -> None:
        """Write the packets that are due."""
        while self._packets and self._packets[0][0] <= now_s:
            self._write(self._packets.popleft()[1])

    @property
    def due_s(self) -> float | None:
        """Return the time at which the next packet arrives; None if none is in flight."""
        return self._packets[0][0] if self._packets else None


def make_interface(name: str) -> int:
    """Make a TUN interface; return the file descriptor for its packets."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return file


def _writer(file: int) -> Callable[[bytes], object]:
    def write(packet: bytes) -> None:
        try:
            os.write(file, packet)
        except OSError:  # the interface is down; packets may be lost
            return

    return write


def main() -> None:
    """Carry packets; see the module's docstring."""
    here, there, delay_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
    files = make_interface(here), make_interface(there)
    ways = {source: Delay(delay_s, _writer(target)) for source, target in (files, reversed(files))}
    os.nice(_PRIORITY)
    print("ready", flush=True)
    waiting = select.epoll()
    for file in files:
        waiting.register(file, select.EPOLLIN)
    while True:
        dues = [way.due_s for way in ways.values() if way.due_s is not None]
        wait_s = max(0.0, min(dues) - time.monotonic()) if dues else -1
        for file, _ in waiting.poll(wait_s):
            try:
                for _ in range(_AT_ONCE):
                    ways[file].take(os.read(file, 1 << 16), time.monotonic())
            except BlockingIOError:
                continue
            except OSError:  # the interface is not up
                continue
        now_s = time.monotonic()
        for way in ways.values():
            way.deliver(now_s)


if __name__ == "__main__":
    main()
