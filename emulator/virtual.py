"""The virtual-time shell: one event heap drives the real dispatcher and real device cores.

Links and compute are modelled with each device's plain rates: messages of a direction follow one
another at the link's rate and arrive a latency later; multiplications of a device follow one
another at its FLOP/s. The clock moves only while somebody waits for a result, so GEMMs submitted
before the first wait start at the same virtual instant. The PS's own work is left out of the clock.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count
from typing import Any

from cleave.arrays import DType
from cleave.device.core import Compute, DeviceCore
from cleave.device.executors import Executor
from cleave.errors import FleetError, UsageError
from cleave.fleet.coordinator import (
    Close,
    Coordinator,
    Done,
    Failure,
    Joined,
    Order,
    Place,
    Send,
)
from cleave.fleet.fleet import Fleet, FleetCounters, GemmFuture, floor_bytes
from cleave.fleet.output import Output
from cleave.planner.plan import DeviceRates
from cleave.protocol import messages
from cleave.protocol.codec import wire_size
from cleave.protocol.messages import Message, Op, Role
from emulator.deferred import DeferredOutput, DeferredProduct, default_executor
from profiles.fleet_device import FleetDevice
from profiles.fleets import paper_fleet


class Direction(Enum):
    """Which way a message went."""

    DOWN = "down"
    UP = "up"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message on an emulated link, for whoever wants to look (`VirtualShell.observers`)."""

    at_s: float
    device: int
    direction: Direction
    message: Message
    nbytes: int


@dataclass(slots=True)
class _VirtualDevice:
    id: int
    profile: FleetDevice
    core: DeviceCore
    down_free_s: float = 0.0  # when the link has sent what it was given
    up_free_s: float = 0.0
    compute_free_s: float = 0.0
    alive: bool = True


@dataclass
class VirtualShell:
    """Moves virtual time and modelled bytes. Use `emulated` to make a fleet of it.

    Args:
        profiles: the devices.
        executor: multiplies for all of them.
        whole_tiles: multiply tile by tile when a GEMM is complete (see `emulator.deferred`); False
            multiplies every block on its own when its device has computed it, as a live one does.
    """

    profiles: Sequence[FleetDevice]
    executor: Executor
    whole_tiles: bool = True
    clock: str = "virtual"
    now_s: float = 0.0
    events: int = 0
    observers: list[Callable[[Transfer], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.coordinator = Coordinator()
        self.devices: dict[int, _VirtualDevice] = {}
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = count()
        self._ids = count(1)
        self._futures: dict[int, GemmFuture] = {}
        self._outputs: dict[int, Output | DeferredOutput] = {}
        self._released: deque[int] = deque()
        self._counters = FleetCounters()
        for profile in self.profiles:
            self.join(profile)
        while self.coordinator.ready_devices < len(self.profiles):
            self._step()

    # --- the population ---

    def join(self, profile: FleetDevice) -> int:
        """A device connects and says hello; returns its id."""
        device = _VirtualDevice(next(self._ids), profile, DeviceCore(profile.memory_bytes))
        device.down_free_s = device.up_free_s = device.compute_free_s = self.now_s
        self.devices[device.id] = device
        self.coordinator.opened(device.id, self.now_s)
        hello = messages.Hello(
            role=Role.DEVICE,
            name=profile.name,
            ops=(Op.MATMUL.value,),
            dtypes=tuple(dtype.value for dtype in DType),
            memory_bytes=profile.memory_bytes,
            profile=profile.name,
            flops_per_s=profile.flops_per_s,
            downlink_bytes_per_s=profile.downlink_bytes_per_s,
            uplink_bytes_per_s=profile.uplink_bytes_per_s,
            latency_s=profile.latency_s,
        )
        self._send_up(device, hello)
        return device.id

    def lose(self, device: int, *, in_s: float = 0.0) -> None:
        """A device vanishes, `in_s` virtual seconds from now."""
        self._at(self.now_s + in_s, self._vanish, device)

    def _vanish(self, device_id: int) -> None:
        device = self.devices.pop(device_id, None)
        if device is not None:
            device.alive = False
            self._obey(self.coordinator.closed(device_id, "the device vanished", self.now_s))

    # --- the `Shell` of a fleet ---

    def start(self, future: GemmFuture) -> None:
        """See `Shell.start`."""
        self._forget_released()
        work = future.work
        self._futures[work.id] = future
        make = DeferredOutput if self.whole_tiles else Output
        self._outputs[work.id] = make(future.out)
        down, up = floor_bytes(future)
        self._counters.floor_down_bytes += down
        self._counters.floor_up_bytes += up
        self._counters.gemms += 1
        a, b = future.a.operand.buffer, future.b.operand.buffer
        self._obey(self.coordinator.submit(work, a, b, self.now_s))

    def wait(self, future: GemmFuture) -> None:
        """See `Shell.wait`: runs the event heap until the future is done."""
        wall_s, virtual_s = time.perf_counter(), self.now_s
        while not future.done:
            if not self._heap:
                raise FleetError(
                    "every emulated device is gone and none is due to join; the GEMM cannot finish"
                )
            self._step()
        self._counters.waited_s += time.perf_counter() - wall_s
        self._counters.fleet_s += self.now_s - virtual_s

    def release(self, operand: int) -> None:
        """See `Shell.release`. Only noted here: the garbage collector may call at any moment."""
        self._released.append(operand)

    def counters(self) -> FleetCounters:
        """See `Shell.counters`."""
        done = self.coordinator.dispatcher.counters
        return replace(self._counters, blocks=done.results, reissued=done.reissued, late=done.late)

    def device_count(self) -> int:
        """See `Shell.device_count`."""
        return self.coordinator.ready_devices

    def fleet_rates(self) -> tuple[int, list[DeviceRates]]:
        """See `Shell.fleet_rates`."""
        return self.coordinator.epoch, self.coordinator.dispatcher.rates

    def close(self) -> None:
        """See `Shell.close`."""
        self.devices.clear()
        self._heap.clear()

    # --- time ---

    def _at(self, when_s: float, what: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._heap, (when_s, next(self._sequence), what, arguments))

    def _step(self) -> None:
        when_s, _, what, arguments = heapq.heappop(self._heap)
        self.now_s = max(self.now_s, when_s)
        self.events += 1
        what(*arguments)

    def _forget_released(self) -> None:
        while self._released:
            self._obey(self.coordinator.release(self._released.popleft(), self.now_s))

    # --- the PS's orders ---

    def _obey(self, orders: Sequence[Order]) -> None:
        waiting = deque(orders)
        while waiting:
            match waiting.popleft():
                case Send(session, message):
                    device = self.devices.get(session)
                    if device is not None:
                        self._send_down(device, message)
                case Place(unit, payload):
                    self._outputs[unit.work].place(unit.detail, payload)
                    waiting.extend(self.coordinator.placed(unit, self.now_s))
                case Done(work):
                    self._outputs.pop(work).finish()
                    self._counters.tiles += _tiles(self._futures[work])
                    self._futures.pop(work).done = True
                case Failure(work, reason):
                    self._outputs.pop(work)
                    future = self._futures.pop(work)
                    future.error, future.done = reason, True
                case Joined():
                    pass
                case Close(session):
                    self.devices.pop(session, None)

    # --- links and compute ---

    def _send_down(self, device: _VirtualDevice, message: Message) -> None:
        nbytes = wire_size(message)
        self._counters.downlink_bytes += nbytes
        self._note(device, Direction.DOWN, message, nbytes)
        begin_s = max(self.now_s, device.down_free_s)
        device.down_free_s = begin_s + nbytes / device.profile.downlink_bytes_per_s
        self._at(device.down_free_s + device.profile.latency_s, self._to_device, device, message)

    def _to_device(self, device: _VirtualDevice, message: Message) -> None:
        if not device.alive:
            return
        if isinstance(message, messages.Error):
            raise UsageError(f"emulated device {device.profile.name!r}: {message.message}")
        if isinstance(message, messages.Bye):
            return
        for action in device.core.received(message):
            if isinstance(action, Compute):
                begin_s = max(self.now_s, device.compute_free_s)
                duration_s = action.flops / device.profile.flops_per_s
                device.compute_free_s = begin_s + duration_s
                self._at(device.compute_free_s, self._computed, device, action, duration_s)
            else:
                self._send_up(device, action)

    def _computed(self, device: _VirtualDevice, order: Compute, duration_s: float) -> None:
        if not device.alive:
            return
        product = DeferredProduct(order, self.executor)
        payload = product if self.whole_tiles else product.compute()
        for action in device.core.computed(order.run, payload, duration_s):
            assert not isinstance(action, Compute)
            self._send_up(device, action)

    def _send_up(self, device: _VirtualDevice, message: Message) -> None:
        nbytes = wire_size(message)
        self._counters.uplink_bytes += nbytes
        self._note(device, Direction.UP, message, nbytes)
        begin_s = max(self.now_s, device.up_free_s)
        device.up_free_s = begin_s + nbytes / device.profile.uplink_bytes_per_s
        self._at(device.up_free_s + device.profile.latency_s, self._to_ps, device, message)

    def _to_ps(self, device: _VirtualDevice, message: Message) -> None:
        if device.alive:
            self._obey(self.coordinator.received(device.id, message, self.now_s))

    def _note(
        self, device: _VirtualDevice, direction: Direction, message: Message, nbytes: int
    ) -> None:
        for observer in self.observers:
            observer(Transfer(self.now_s, device.id, direction, message, nbytes))


def _tiles(future: GemmFuture) -> int:
    plan = future.work.plan
    return len(plan.tiles) if plan else 0


def emulated(
    devices: int | Sequence[FleetDevice] = 8,
    *,
    executor: Executor | None = None,
    whole_tiles: bool = True,
) -> Fleet:
    """A fleet of emulated devices in this process, in virtual time.

    Args:
        devices: how many of the built-in `paper-N` fleet, or the profiles to emulate.
        executor: what multiplies; torch where it is installed, else numpy.
        whole_tiles: see `VirtualShell`.

    Example:
        >>> fleet = emulated(8)
        >>> fleet.device_count
        8
    """
    profiles = paper_fleet(devices) if isinstance(devices, int) else list(devices)
    return Fleet(VirtualShell(profiles, executor or default_executor(), whole_tiles))
