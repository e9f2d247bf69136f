"""The fleet as training sees it: operands, submitted GEMMs, futures, counters."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import count
from types import TracebackType
from typing import Protocol, Self
from weakref import WeakValueDictionary

from cleave.arrays import Buffer, DType
from cleave.errors import FleetError
from cleave.gemm import Gemm, gemm_of
from cleave.planner.plan import DeviceRates, ElementBytes, Planner
from cleave.planner.planner import TilePlanner
from cleave.scheduler.gemm_job import GemmWork, MatrixRef


@dataclass(slots=True)
class FleetCounters:
    """What the fleet did since it was made; subtract two snapshots for a step.

    Attributes:
        fleet_s: seconds on the fleet's clock (virtual or wall) during which GEMMs were awaited.
        waited_s: wall seconds that the caller spent inside `GemmFuture.result`.
        verify_s: processor seconds spent on checking results.
        downlink_bytes, uplink_bytes: encoded messages, PS to devices and back.
        floor_down_bytes, floor_up_bytes: every operand of every GEMM crossing once, and every
            result once.
        gemms, tiles, blocks: planned GEMMs, their tiles, and blocks that came back.
        reissued: units given out again because a device was lost or failed.
        late: answers that nobody waited for any more.
        local_gemms: multiplied on the PS because no device was there.
    """

    fleet_s: float = 0.0
    waited_s: float = 0.0
    verify_s: float = 0.0
    downlink_bytes: int = 0
    uplink_bytes: int = 0
    floor_down_bytes: int = 0
    floor_up_bytes: int = 0
    gemms: int = 0
    tiles: int = 0
    blocks: int = 0
    reissued: int = 0
    late: int = 0
    local_gemms: int = 0

    def __add__(self, more: FleetCounters) -> FleetCounters:
        return FleetCounters(
            **{f.name: getattr(self, f.name) + getattr(more, f.name) for f in fields(self)}
        )

    def __sub__(self, earlier: FleetCounters) -> FleetCounters:
        return FleetCounters(
            **{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)}
        )


class Operand:
    """One version of one matrix, under one name, for as long as this object lives.

    Devices may keep what they were sent of it; when the object goes, they are told to forget it.
    The matrix must not change meanwhile.

    Attributes:
        id: its name; never used again.
        buffer: the matrix, row-major or not.
    """

    __slots__ = ("__weakref__", "buffer", "id")

    def __init__(self, id: int, buffer: Buffer) -> None:
        self.id = id
        self.buffer = buffer


@dataclass(frozen=True, slots=True)
class Side:
    """An operand as one side of a product, as it lies or transposed."""

    operand: Operand
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.operand.buffer.shape
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def matrix(self) -> Buffer:
        """The matrix as it enters the product."""
        return self.operand.buffer.T if self.transposed else self.operand.buffer


@dataclass(slots=True, eq=False, weakref_slot=True)
class GemmFuture:
    """A GEMM under way. `result` waits for it."""

    work: GemmWork
    a: Side
    b: Side
    out: Buffer
    _wait: Callable[[GemmFuture], object]
    done: bool = False
    error: str = ""

    def result(self) -> Buffer:
        """The product, once every block of it is in place.

        Raises:
            FleetError: when the fleet cannot finish it.
        """
        if not self.done:
            self._wait(self)
        if self.error:
            raise FleetError(self.error)
        return self.out


class Shell(Protocol):
    """What moves time and bytes for a fleet: live (`cleave.transport`) or virtual (`emulator`)."""

    clock: str

    def start(self, future: GemmFuture) -> None:
        """Take a GEMM; does not wait."""
        ...

    def wait(self, future: GemmFuture, timeout_s: float | None = None) -> bool:
        """Return when the future is done, or so many seconds have passed on the shell's clock.

        Returns:
            Whether it is done.
        """
        ...

    def withdraw(self, future: GemmFuture) -> None:
        """Take a GEMM back. The future is done then: as withdrawn, or as it ended just before."""
        ...

    def elsewhere(self, flops: float) -> None:
        """The caller did so much work itself: the clock goes on by what that takes."""
        ...

    def release(self, operand: int) -> None:
        """An operand's name is not used any more. May be called from any thread, in any state."""
        ...

    def counters(self) -> FleetCounters:
        """A snapshot of the counters."""
        ...

    def device_count(self) -> int:
        """How many devices may be given work now."""
        ...

    def stuck(self, future: GemmFuture) -> str:
        """Why no device that is there can finish a GEMM; empty where one can, or none is there."""
        ...

    def fleet_rates(self) -> tuple[int, list[DeviceRates]]:
        """The fleet's epoch, and the rates of the devices that may be given work now."""
        ...

    def close(self) -> None:
        """End all sessions."""
        ...


class Pending(Protocol):
    """A multiplication under way."""

    @property
    def done(self) -> bool:
        """Whether the product is there, so that `result` does not wait."""
        ...

    def result(self) -> Buffer:
        """See `GemmFuture.result`."""
        ...


class Multiplier(Protocol):
    """What a model needs of a fleet; a `Fleet`, or one wrapped in others of this kind."""

    def operand(self, buffer: Buffer) -> Operand:
        """See `Fleet.operand`."""
        ...

    def submit(self, a: Side, b: Side, out: Buffer) -> Pending:
        """See `Fleet.submit`."""
        ...


@dataclass(frozen=True, slots=True)
class Finished:
    """A product that is there already."""

    out: Buffer

    @property
    def done(self) -> bool:
        """See `Pending.done`."""
        return True

    def result(self) -> Buffer:
        """See `GemmFuture.result`."""
        return self.out


@dataclass
class Fleet:
    """A fleet of devices that multiplies matrices.

    What it does when it has no devices, and which multiplications are worth sending, is decided by
    what it is wrapped in: `cleave.fleet.local_fallback`, `cleave.fleet.selection`.

    Args:
        shell: what moves time and bytes.
        planner: who chooses the tiles.
    """

    shell: Shell
    planner: Planner = field(default_factory=TilePlanner)

    def __post_init__(self) -> None:
        self._operands = count(1)
        self._works = count(1)
        # While one is under way its shell holds it.
        self._under_way: WeakValueDictionary[int, GemmFuture] = WeakValueDictionary()

    @property
    def clock(self) -> str:
        """`virtual` or `wall`: what `fleet_s` counts."""
        return self.shell.clock

    def operand(self, buffer: Buffer) -> Operand:
        """Name a matrix. It must not change while the operand lives."""
        operand = Operand(next(self._operands), buffer)
        weakref.finalize(operand, self.shell.release, operand.id).atexit = False
        return operand

    def submit(self, a: Side, b: Side, out: Buffer) -> GemmFuture:
        """Start ``out = a @ b``; GEMMs submitted before the first `result` are in flight together.

        Args:
            a, b: shapes (m, k) and (k, n), of one dtype.
            out: shape (m, n); the dtype of the operands, or fp32.

        Raises:
            ValueError: when shapes or dtypes do not fit.
        """
        gemm, element, dtype = product_of(a, b, out)
        work = GemmWork(
            next(self._works),
            gemm,
            MatrixRef(a.operand.id, a.transposed),
            MatrixRef(b.operand.id, b.transposed),
            element,
            dtype.value,
            out.dtype.value,
            self.planner,
        )
        future = GemmFuture(work, a, b, out, self._await)
        if gemm.volume:
            self.shell.start(future)
            self._under_way[work.id] = future
        else:  # nothing to multiply: an empty sum is zero
            out.array[...] = 0
            future.done = True
        return future

    def _await(self, future: GemmFuture) -> None:
        self.shell.wait(future)
        self._under_way.pop(future.work.id, None)

    def abandon(self) -> None:
        """Take back every GEMM that nobody has waited for to its end."""
        for future in list(self._under_way.values()):
            if not future.done:
                self.shell.withdraw(future)
        self._under_way.clear()

    def counters(self) -> FleetCounters:
        """A snapshot of the counters."""
        return self.shell.counters()

    @property
    def device_count(self) -> int:
        """How many devices may be given work now."""
        return self.shell.device_count()

    def close(self) -> None:
        """End all sessions. Closing twice does nothing."""
        self.shell.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def product_of(a: Side, b: Side, out: Buffer) -> tuple[Gemm, ElementBytes, DType]:
    """Return the GEMM ``out = a @ b``, its elements' sizes, and its operands' dtype.

    Raises:
        ValueError: when shapes or dtypes do not fit.
    """
    gemm = gemm_of(a.shape, b.shape)
    dtype = a.operand.buffer.dtype
    if out.shape != (gemm.m, gemm.n) or b.operand.buffer.dtype is not dtype:
        raise ValueError(
            f"{a.shape} {dtype.value} @ {b.shape} {b.operand.buffer.dtype.value} does not go "
            f"into {out.shape}"
        )
    if out.dtype not in (dtype, DType.FP32):
        raise ValueError(
            f"a product of {dtype.value} matrices is {dtype.value} or fp32, not {out.dtype.value}"
        )
    return gemm, ElementBytes(dtype.itemsize, out.dtype.itemsize), dtype


def floor_bytes(future: GemmFuture) -> tuple[int, int]:
    """Bytes down and up if every operand and result of a GEMM crossed once."""
    down = future.a.operand.buffer.nbytes + future.b.operand.buffer.nbytes
    return down, future.out.nbytes
