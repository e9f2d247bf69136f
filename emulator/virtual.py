"""Emulate a fleet in virtual time: one event heap drives the real scheduler and device cores.

Only the links, the processors and the devices' availability are modelled. The clock advances only
while the caller waits or reports local work. Threads may share a fleet, but only one thread at a
time advances the clock. Payloads are not compressed. Instead, their sizes are multiplied by typical
compression ratios (`cleave.planner.coding`).
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache, wraps
from heapq import heappop, heappush
from itertools import count
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import numpy as np

from cleave.arrays import Buffer, DType
from cleave.device.compute_thread import checked_memory, compute
from cleave.device.core import DeviceCore, HeldArrays, Order
from cleave.errors import FleetError, UsageError
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import GemmFuture, Output
from cleave.fleet.runtime import Placing, Runtime
from cleave.machine.backends import Compute, MatmulBackend
from cleave.machine.graph_choice import open_in_process
from cleave.planner.coding import CodingPolicy, coded_ratio
from cleave.planner.plan import PsRates
from cleave.planner.tiles.boxes import collector_paused
from cleave.planner.tiles.planner import TilePlanner
from cleave.protocol import messages
from cleave.protocol.codec import payload_bytes, wire_size
from cleave.protocol.limits import CODED_LEAST_BYTES
from cleave.protocol.messages import ErrorCode, Feature, Message, Op, Role
from cleave.scheduler.counters import FleetCounters, TrafficKind
from cleave.scheduler.instructions import ForRuntime
from cleave.scheduler.rounds.work import RoundResult, RoundWork
from cleave.scheduler.sessions.joining import ASSUMED_FLOPS_PER_S
from cleave.scheduler.sessions.result_judging import Verification
from cleave.scheduler.sessions.session import DeviceState
from cleave.scheduler.sessions.session_manager import SessionManager
from cleave.scheduler.stages.outcomes import StageOutcome
from cleave.scheduler.stages.runs import StagesOn
from cleave.scheduler.stages.work import StepWork
from emulator.activity import Activity, Direction, Presence, Transfer, execution
from emulator.deferred import (
    DeferredOutput,
    DeferredProduct,
    SizedOutput,
    SizedProduct,
    default_backend,
)
from emulator.device_model import Departure, EmulatedProcessor, Link, SharedLines, links_of
from profiles import availability
from profiles.fleet_device import FleetDevice, SharedBottleneck
from profiles.fleets import paper_fleet


class Arithmetic(Enum):
    """Ways to compute the matrix multiplications of emulated devices."""

    WHOLE_TILES = "whole-tiles"
    """Multiply once per tile, after all blocks of a GEMM have arrived (`emulator.deferred`)."""

    BLOCKS = "blocks"  # multiply once per block, when the device finishes the block
    NONE = "none"  # record only sizes of results, so models may exceed this machine's memory


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _alone(
    method: Callable[Concatenate[VirtualRuntime, _Arguments], _Result],
) -> Callable[Concatenate[VirtualRuntime, _Arguments], _Result]:
    """Wrap a method that may advance the clock, so that each call holds the runtime's lock."""

    @wraps(method)
    def alone(
        self: VirtualRuntime, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> _Result:
        with self._lock:
            return method(self, *args, **kwargs)

    return alone


@dataclass(slots=True)
class _VirtualDevice:
    id: int
    profile: FleetDevice
    core: DeviceCore
    processor: EmulatedProcessor
    down: Link
    up: Link
    alive: bool = True


class VirtualRuntime(Runtime):
    """A runtime in virtual time, with modelled links. `emulated` returns a fleet that uses it.

    Args:
        profiles: the devices to emulate.
        backend: executes the matrix multiplications of all devices; None to compute nothing.
        arithmetic: how matrix multiplications are computed.
        ps: rates of the server's network card and event loop; None for an unlimited card and
            processing that takes no time.
        seed: random seed for jitter, drift and the devices' availability. start_hour: hour of the
            day at virtual time 0, for devices with daily presence hours. verify: which results to
            check, as for `cleave serve --verify`. coding: links on which payloads count as
            compressed, as for `cleave serve --coding`. observe: True to plan with observed rates;
            False to plan reproducibly with stated rates.

    Attributes:
        observers: functions that the runtime calls with every activity of every device.
    """

    clock = "virtual"

    def __init__(
        self,
        profiles: Sequence[FleetDevice],
        backend: MatmulBackend | None,
        arithmetic: Arithmetic = Arithmetic.WHOLE_TILES,
        ps: PsRates | None = None,
        seed: int = 0,
        start_hour: float = 0.0,
        verify: Verification | str | bool = True,
        observe: bool = False,
        coding: CodingPolicy | str = CodingPolicy.AUTO,
    ) -> None:
        self.profiles = profiles
        self.backend = backend
        self.arithmetic = arithmetic
        self.now_s = 0.0
        self.events = 0
        self.observers: list[Callable[[Activity], None]] = []
        self._lock = threading.RLock()
        super().__init__(
            SessionManager(
                verify=verify,
                crossed=False,
                rng=random.Random(f"{seed} checks"),
                observe=observe,
                stages_on=StagesOn.ANY,
                coding=coding,
                card=ps,
                expected_devices=max(1, len(profiles)),
            ),
            np.random.default_rng(random.Random(f"{seed} secrets").getrandbits(128)),
        )
        if self.manager.verify and arithmetic is not Arithmetic.BLOCKS:
            raise UsageError(
                f"results cannot be checked individually with arithmetic {arithmetic.value!r}; "
                f"use whole_tiles=False, or verify=False"
            )
        self.devices: dict[int, _VirtualDevice] = {}
        # Devices compute one after the other, so they share what each would make of a graph.
        self._open = lru_cache(_MOST_GRAPHS)(open_in_process)
        memory_of = lru_cache(_MOST_GRAPHS)(checked_memory)
        self._memory = lambda model: memory_of(bytes(model))
        self.seed = seed
        self._block_s, self._byte_s = (ps.block_s, ps.byte_s) if ps else (0.0, 0.0)
        self._ps_free_s = 0.0
        card = None
        if ps and (ps.egress_bytes_per_s, ps.ingress_bytes_per_s) != (float("inf"),) * 2:
            card = SharedBottleneck(
                "the server's card", ps.egress_bytes_per_s, ps.ingress_bytes_per_s
            )
        self._lines = SharedLines(card)
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._sequence = count()
        self._ids = count(1)
        self._released: deque[int] = deque()
        self._outcomes: deque[StageOutcome | RoundResult] = deque()
        for number, profile in enumerate(profiles):
            when = profile.availability
            if when is None or when.always:
                self.join(profile)
            else:
                rng = random.Random(f"{seed} presence {number} {profile.name}")
                self._expect(profile, when.presences(rng, start_hour))
        here = list(self.devices.values())
        while any(self._joining(device) for device in here):
            self._step()

    # --- the population ---

    def _joining(self, device: _VirtualDevice) -> bool:
        """Return True while a connected device waits for the PS to welcome or refuse it."""
        session = self.manager.sessions.get(device.id)
        waits = session is None or session.state in (DeviceState.JOINING, DeviceState.PROBING)
        return waits and device.alive and not device.core.draining

    def _expect(
        self,
        profile: FleetDevice,
        presences: Iterator[availability.PresencePeriod],
        held: HeldArrays | None = None,
    ) -> None:
        """Let a device join at the start of its next presence period, or now if that has passed."""
        presence = next(presences, None)
        if presence is None:
            return
        if presence.from_s <= self.now_s:
            self._come(profile, presence.to_s, presences, held)
        else:
            self._at(presence.from_s, self._come, profile, presence.to_s, presences, held)

    def _come(
        self,
        profile: FleetDevice,
        to_s: float,
        presences: Iterator[availability.PresencePeriod],
        held: HeldArrays | None,
    ) -> None:
        device = self.join(profile, held)
        if to_s < float("inf"):
            self._at(to_s, self._go, device, profile, presences)

    def _go(
        self, device: int, profile: FleetDevice, presences: Iterator[availability.PresencePeriod]
    ) -> None:
        held = None
        if profile.availability is not None and profile.availability.drains:
            self._drain(device)
        else:
            held = self._vanish(device)
        self._expect(profile, presences, held)

    @_alone
    def join(self, profile: FleetDevice, held: HeldArrays | None = None) -> int:
        """Connect a new device, send its `hello` to the PS, and return its ID.

        `held` contains the arrays that the device still has from an earlier connection.
        """
        number = next(self._ids)
        rng = random.Random(f"{self.seed} link {number} {profile.name}")
        down, up = links_of(profile, rng, self._lines, self.now_s)
        processor = EmulatedProcessor(profile, self.now_s)
        hello = replace(hello_of(profile), holds=held.of if held is not None else "")
        core = DeviceCore(profile.memory_bytes, hello.features, held)
        device = _VirtualDevice(number, profile, core, processor, down, up)
        self.devices[number] = device
        self.manager.opened(number, self.now_s)
        self._tell(Presence(self.now_s, number, profile.name, True))
        self._send_up(device, hello)
        return number

    @_alone
    def lose(self, device: int, *, in_s: float = 0.0, away_s: float | None = None) -> None:
        """Disconnect a device without notice after `in_s` virtual seconds.

        After `away_s` more seconds, the device reconnects and still has its arrays. If `away_s` is
        None, the device does not reconnect.
        """

        def lose() -> None:
            profile = self.devices[device].profile if device in self.devices else None
            held = self._vanish(device)
            if profile is not None and away_s is not None:
                self._at(self.now_s + away_s, self.join, profile, held)

        self._at(self.now_s + in_s, lose)

    def _vanish(self, device_id: int) -> HeldArrays | None:
        """Disconnect a device without notice, and return the arrays that it still has."""
        device = self.devices.get(device_id)
        if device is not None:
            device.alive = False  # so messages in flight are lost
            for link in (device.down, device.up):
                while len(link.queue) > 1:  # a piece of the first message is already in transit
                    link.queue.pop()
                for departure in link.queue:
                    departure.left_bytes = 0
            self._part(device)
            self.execute(self.manager.closed(device_id, "the device vanished", self.now_s))
            self._at(self.now_s + self.manager.stages.holders.return_s, self._expire)
        return device.core.held if device is not None else None

    def _expire(self) -> None:
        self.execute(self.manager.expire(self.now_s))

    def _drain(self, device_id: int) -> None:
        device = self.devices.get(device_id)
        if device is not None:
            for action in device.core.drain():
                assert not isinstance(action, Order)
                self._send_up(device, action)

    def _part(self, device: _VirtualDevice) -> None:
        del self.devices[device.id]
        self._tell(Presence(self.now_s, device.id, device.profile.name, False))

    # --- the interface for `Fleet` ---

    @_alone
    def start(self, future: GemmFuture) -> None:
        """Start a GEMM; return without waiting for its result."""
        self._forget_released()
        self.count(future)
        with collector_paused():
            self.submit(future)

    def output(self, out: Buffer) -> Placing:
        """Return the object that writes a GEMM's blocks into `out`."""
        return _OUTPUTS[self.arithmetic](out)

    @_alone
    def wait(self, future: GemmFuture, timeout_s: float | None = None) -> bool:
        """Process events until a GEMM is done; return False if the timeout expires first.

        Raises FleetError if the GEMM cannot finish. The timeout is in virtual seconds.
        """
        wall_s, virtual_s = time.perf_counter(), self.now_s
        until_s = float("inf") if timeout_s is None else self.now_s + timeout_s
        stuck, job = self.manager.scheduler.stuck, future.job.id
        with collector_paused():
            while not future.done:
                if timeout_s is not None and self.next_event_s > until_s:
                    self.now_s = max(self.now_s, until_s)
                    break
                if timeout_s is None and (reason := stuck(job)):
                    raise FleetError(f"the GEMM cannot finish: {reason}")
                if not self._heap:
                    raise FleetError(
                        "all emulated devices have left and none will join; the GEMM cannot finish"
                    )
                self._step()
        self._counters.waited_s += time.perf_counter() - wall_s
        self._counters.fleet_s += self.now_s - virtual_s
        return future.done

    @_alone
    def wait_until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Process events until a condition is true; return False if time or events run out first.

        The condition is checked first and after every event. The timeout is in virtual seconds.
        """
        until_s = float("inf") if timeout_s is None else self.now_s + timeout_s
        while not condition():
            if not self._heap or self.next_event_s > until_s:
                return False
            self._step()
        return True

    @_alone
    def withdraw(self, future: GemmFuture) -> None:
        """Cancel a GEMM and withdraw the GEMM's outstanding tasks from the devices."""
        self.execute(self.manager.withdraw(future.job.id, self.now_s))

    @_alone
    def begin_step(self, work: StepWork) -> None:
        """Start a training step by stages; return without waiting for an outcome."""
        self._forget_released()
        self._outcomes.clear()
        self.count_step(work)
        self.execute(self.manager.begin_step(work, self.now_s))

    @_alone
    def begin_round(self, work: RoundWork) -> None:
        """Start a round of local updates; return without waiting for its result."""
        self._forget_released()
        self._outcomes.clear()
        self.execute(self.manager.begin_round(work, self.now_s))

    @_alone
    def change_step(self, change: Callable[..., list[ForRuntime]], *arguments: object) -> None:
        self.execute(change(*arguments, self.now_s))

    @_alone
    def next_outcome(self, timeout_s: float | None = None) -> StageOutcome | RoundResult | None:
        """Process events until the step has an outcome; return it, or None after a timeout.

        Raises FleetError if all devices have left and none will join. The timeout is in virtual
        seconds.
        """
        wall_s, virtual_s = time.perf_counter(), self.now_s
        until_s = float("inf") if timeout_s is None else self.now_s + timeout_s
        with collector_paused():
            while not self._outcomes and self._heap and self.next_event_s <= until_s:
                self._step()
        if not self._outcomes and not self._heap:
            raise FleetError(
                "all emulated devices have left and none will join; the step cannot finish"
            )
        if not self._outcomes:
            self.now_s = max(self.now_s, until_s)
        self._counters.waited_s += time.perf_counter() - wall_s
        self._counters.fleet_s += self.now_s - virtual_s
        return self._outcomes.popleft() if self._outcomes else None

    def tell_step(
        self, outcome: StageOutcome | RoundResult, work: StepWork | RoundWork | None
    ) -> None:
        """Queue an outcome of the current step for `next_outcome`."""
        self._outcomes.append(outcome)

    def quarantine(self, device: int, reason: str) -> None:
        """Send a `quarantined` error to a device that returned a wrong result; end its session."""
        self.execute(self.manager.refuse(device, ErrorCode.QUARANTINED, reason, self.now_s))

    @_alone
    def advance_for_local_work(self, flops: float) -> None:
        """Advance the clock by the time that the caller is assumed to need for `flops` FLOPs."""
        self._advance(self.now_s + flops / ASSUMED_FLOPS_PER_S)

    def release(self, operand: int) -> None:
        """Queue an operand for release. The garbage collector may call this in any thread."""
        self._released.append(operand)

    def unbind(self, operand: int) -> None:
        """Free the memory that an operand occupies on the PS; copies on devices remain."""
        self.manager.unbind(operand)

    def add(self, counters: FleetCounters) -> None:
        """Add the counters of replayed GEMMs (`emulator.sized_step`) to the runtime's counters."""
        # The scheduler itself counts `blocks`, `reissued` and `late`. A replay does not wait.
        self._counters += replace(counters, waited_s=0.0, blocks=0, reissued=0, late=0)

    def close(self) -> None:
        """Disconnect all devices and discard all scheduled events."""
        self.devices.clear()
        self._heap.clear()

    # --- time ---

    def _at(self, when_s: float, what: Callable[..., object], *arguments: Any) -> None:
        heappush(self._heap, (when_s, next(self._sequence), what, arguments))

    def _step(self) -> None:
        when_s, _, what, arguments = heappop(self._heap)
        if when_s > self.now_s:
            self.now_s = when_s
        self.events += 1
        what(*arguments)

    @_alone
    def settle(self) -> bool:
        """Process events until all messages in flight have arrived.

        Call this method after all GEMMs are done and all operands are released. Return True if
        devices hold no arrays and no tasks are in flight, as in a new fleet.
        """
        self._forget_released()
        self.execute(self.manager.pause(self.now_s))
        last_s = self.now_s
        for device in self.devices.values():
            links_s = (link.free_s + link.latency_s for link in (device.down, device.up))
            last_s = max(last_s, device.processor.free_s, *links_s)
        self._advance(last_s)
        return self.manager.scheduler.blank

    def _advance(self, until_s: float) -> None:
        """Process all events up to `until_s` and advance the clock to `until_s`."""
        while self.next_event_s <= until_s:
            self._step()
        self.now_s = max(self.now_s, until_s)

    @property
    def next_event_s(self) -> float:
        """Return the virtual time of the next event in seconds, or infinity if no event is left."""
        return self._heap[0][0] if self._heap else float("inf")

    def _forget_released(self) -> None:
        while self._released:
            self.execute(self.manager.release(self._released.popleft(), self.now_s))

    # --- execution of the scheduler's instructions ---

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self.now_s

    def send(self, session: int, message: Message, kind: TrafficKind) -> None:
        """Send a message to a device and count its bytes; do nothing if the device has left."""
        if (device := self.devices.get(session)) is not None:
            self._send_down(device, message, kind)

    def end(self, session: int) -> None:
        """Disconnect the device of a session."""
        if (device := self.devices.get(session)) is not None:
            self._part(device)

    def conclude(self, job: int, error: str) -> None:
        """Mark a GEMM as done. If `error` is empty (no failure), finish its output first."""
        output, future = self._outputs.pop(job), self._futures.pop(job)
        if not error:
            output.finish()
            plan = future.job.plan
            self._counters.tiles += len(plan.tiles) if plan else 0
        future.error, future.done = error, True

    # --- links and compute ---

    def _send_down(self, device: _VirtualDevice, message: Message, kind: TrafficKind) -> None:
        nbytes = wire_size(message)
        if type(message) is messages.Put and self.manager.sessions[device.id].codes_puts:
            saved_bytes = coding_saves(message)
            self._counters.saved.down.count(kind, saved_bytes)
            nbytes -= saved_bytes
        self._counters.traffic.down.count(kind, nbytes)
        if (session := self.manager.sessions.get(device.id)) is not None:
            session.counters.downlink_bytes += nbytes
        self._transmit(device, device.down, message, nbytes)

    def _send_up(self, device: _VirtualDevice, message: Message) -> None:
        session = self.manager.sessions.get(device.id)
        kind = session.kind_of(message) if session is not None else TrafficKind.OTHER
        nbytes = wire_size(message)
        if device.core.codes_results and type(message) is messages.Result:
            saved_bytes = coding_saves(message)
            self._counters.saved.up.count(kind, saved_bytes)
            nbytes -= saved_bytes
        self._counters.traffic.up.count(kind, nbytes)
        if session is not None:
            session.counters.uplink_bytes += nbytes
        self._transmit(device, device.up, message, nbytes)

    def _transmit(self, device: _VirtualDevice, link: Link, message: Message, nbytes: int) -> None:
        if not link.shared:
            self._left(device, link, message, nbytes, self.now_s, link.transmit(self.now_s, nbytes))
            return
        at_s = self.now_s

        def left(begin_s: float, end_s: float) -> None:
            times_s = begin_s, end_s, link.arrival_s(end_s)
            self._left(device, link, message, nbytes, at_s, times_s)

        link.queue.append(Departure(nbytes, left))
        if len(link.queue) == 1:
            self._depart_next(link)

    def _left(
        self,
        device: _VirtualDevice,
        link: Link,
        message: Message,
        nbytes: int,
        at_s: float,
        times_s: tuple[float, float, float],
    ) -> None:
        """Schedule the arrival of a message.

        `times_s` contains the times at which the first byte leaves, the last byte leaves, and the
        last byte arrives.
        """
        down = link is device.down
        arrive = self._to_device if down else self._to_ps
        heappush(self._heap, (times_s[2], next(self._sequence), arrive, (device, message, nbytes)))
        if self.observers:
            direction = Direction.DOWN if down else Direction.UP
            self._tell(Transfer(at_s, device.id, direction, message, nbytes, *times_s))

    def _depart_next(self, link: Link) -> None:
        """Send the next piece of the first queued message on a link with bottlenecks."""
        if link.queue:
            last = link.queue[0].depart(link, self.now_s)
            self._at(link.free_s, self._departed, link, last)

    def _departed(self, link: Link, last: bool) -> None:
        if last:
            link.queue.popleft()
        self._depart_next(link)

    def _to_device(self, device: _VirtualDevice, message: Message, nbytes: int) -> None:
        if not device.alive:
            return
        if isinstance(message, messages.Error):
            if message.code is ErrorCode.QUARANTINED:
                return
            raise UsageError(f"emulated device {device.profile.name!r}: {message.message}")
        if isinstance(message, messages.Bye):
            return
        for action in device.core.received(message):
            if isinstance(action, Order):
                begin_s, end_s = device.processor.run(action, self.now_s)
                self._at(end_s, self._computed, device, action, end_s - begin_s)
                done = execution(device.id, action, begin_s, end_s) if self.observers else None
                if done is not None:
                    self._tell(done)
            else:
                self._send_up(device, action)

    def _computed(self, device: _VirtualDevice, order: Order, duration_s: float) -> None:
        if not device.alive:
            return
        payload = self._product(device, order)
        if isinstance(payload, str):
            answers = device.core.failed(order.run, payload)
        else:
            answers = device.core.computed(order.run, payload, duration_s)
        for action in answers:
            assert not isinstance(action, Order)
            self._send_up(device, action)

    def _product(self, device: _VirtualDevice, order: Order) -> Any:
        """Return the result of a task, or an error message if the task failed."""
        if self.backend is None or self.arithmetic is Arithmetic.NONE:
            return SizedProduct(order.result_bytes)
        if not isinstance(order, Compute):
            outcome = compute(self.backend, order, self._open, self._memory)
            return outcome if isinstance(outcome, str) else outcome[0]
        product = DeferredProduct(order, self.backend)
        return product if self.arithmetic is Arithmetic.WHOLE_TILES else product.compute()

    def _to_ps(self, device: _VirtualDevice, message: Message, nbytes: int) -> None:
        if not self._block_s:
            self._handle(device, message)
            return
        # The PS has one event loop, which handles the messages of all devices in sequence.
        self._ps_free_s = max(self.now_s, self._ps_free_s) + self._block_s + nbytes * self._byte_s
        self._at(self._ps_free_s, self._handle, device, message)

    def _handle(self, device: _VirtualDevice, message: Message) -> None:
        if device.alive:
            self.execute(self.manager.received(device.id, message, self.now_s))

    def _tell(self, activity: Activity) -> None:
        for observer in self.observers:
            observer(activity)


_MOST_GRAPHS: Final = 64  # open graphs that the devices of a fleet share

_OUTPUTS: dict[Arithmetic, type[Output] | type[DeferredOutput] | type[SizedOutput]] = {
    Arithmetic.WHOLE_TILES: DeferredOutput,
    Arithmetic.BLOCKS: Output,
    Arithmetic.NONE: SizedOutput,
}


def coding_saves(message: messages.Put | messages.Result) -> int:
    """Estimate how many bytes compression saves for a message, based on its dtype and size."""
    nbytes = payload_bytes(message.payload)
    if nbytes < CODED_LEAST_BYTES:
        return 0
    return nbytes - round(nbytes * coded_ratio(message.dtype))


def hello_of(profile: FleetDevice, credential: str = "") -> messages.Hello:
    """Return a device's `hello` message, which states link rates that the PS need not measure."""
    return messages.Hello(
        role=Role.DEVICE,
        credential=credential,
        name=profile.name,
        ops=(Op.MATMUL.value,),
        dtypes=tuple(dtype.value for dtype in DType),
        memory_bytes=profile.memory_bytes,
        profile=profile.profile or profile.name,
        flops_per_s=profile.stated_flops_per_s,
        graph_flops_per_s=profile.stated_graph_flops_per_s,
        downlink_bytes_per_s=profile.stated_downlink_bytes_per_s,
        uplink_bytes_per_s=profile.stated_uplink_bytes_per_s,
        latency_s=profile.latency_s,
        features=(Feature.GRAPHS.value, Feature.CODING.value, Feature.KEEPS.value),
    )


def emulated(
    devices: int | Sequence[FleetDevice] = 8,
    *,
    backend: MatmulBackend | None = None,
    whole_tiles: bool = True,
    compute: bool = True,
    ps: PsRates | None = None,
    seed: int = 0,
    start_hour: float = 0.0,
    verify: Verification | str | bool = True,
    coding: CodingPolicy | str = CodingPolicy.AUTO,
) -> Fleet:
    """Return a fleet of devices that this process emulates in virtual time.

    Args:
        devices: number of devices of the built-in `paper-N` fleet, or a list of devices.
        backend: backend for matrix multiplications; None for torch if it is installed, else NumPy.
        whole_tiles: True to multiply once per tile, after a GEMM is complete; False to multiply
            once per block, as a real device does.
        compute: False to emulate only the sizes of results, without computing any results.
        ps: rates of the server's network card and event loop; None for an unlimited card and
            processing that takes no time.
        seed: random seed for jitter, drift and the devices' availability.
        start_hour: hour of the day at virtual time 0, for devices with daily presence hours.
        verify: which results to check, as for `cleave serve --verify`. `auto` checks none, because
            results never leave the process. `all` and `sample` require `whole_tiles=False`.
        coding: links on which payloads count as compressed, as for `cleave serve --coding`.

    Example:
        >>> fleet = emulated(8)
        >>> fleet.device_count
        8
    """
    if isinstance(devices, int):
        if devices < 1:
            raise UsageError(f"emulated takes 1 device or more, not {devices}")
        devices = paper_fleet(devices)
    elif isinstance(devices, str) or not isinstance(devices, Sequence):
        raise UsageError(
            f"emulated takes a number of devices or a list of devices, not {devices!r}"
        )
    arithmetic, chosen = Arithmetic.NONE, None
    if compute:
        arithmetic = Arithmetic.WHOLE_TILES if whole_tiles else Arithmetic.BLOCKS
        chosen = backend or default_backend()
    runtime = VirtualRuntime(
        list(devices), chosen, arithmetic, ps, seed, start_hour, verify, coding=coding
    )
    return Fleet(runtime, TilePlanner(ps) if ps else TilePlanner())
