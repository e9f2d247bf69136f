"""Test and measure a device before it gets tasks, with ordinary `put` and `run` messages.

Link: almost all the time of a row-by-column product is download time, and almost all the time of a
column-by-row product is upload time. A 1 x 1 product measures a round trip. The arrays grow until a
transfer takes long enough to measure. Round-trip time and compute time are subtracted. Many links
carry the first bytes of a transfer faster than they can sustain, so the rate is computed from the
bytes by which the last array is larger than the one before. A delay only ends the growth if it
occurs twice.

Arithmetic: the device multiplies secret random matrices in each of its dtypes, as stored and
transposed. The results are verified like all other results (`cleave.verify`). The inner dimension
is large and most elements are positive, to reveal 16-bit accumulation and rounded fp32 inputs.

Speed: the device multiplies two matrices repeatedly, until the compute time is clearly
distinguishable from the transfer time, which is known because the link is measured first. If the
measured speed is less than a tenth of the claimed speed, plans use the measured speed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Final

import numpy as np

from cleave.arrays import Buffer, DType, narrow, unpack
from cleave.errors import ProtocolError
from cleave.gemm import Block, Span
from cleave.planner.plan import DeviceRates
from cleave.protocol import messages
from cleave.protocol.codec import payload_bytes
from cleave.protocol.messages import Measured, Message, Op
from cleave.scheduler.sessions.reputation import ASIDE_AFTER
from cleave.verify import GemmCheck

# First ID of arrays and runs of probes, far above the scheduler's IDs. JavaScript can still
# represent it as an exact integer.
FIRST_ID: Final = 2**52
_FIRST_BYTES: Final = 2 * 1024  # takes at most 3 s on the slowest allowed link
_GROWTH: Final = 4
_LEAST_S: Final = 20e-6
_LEAST_SHARE: Final = 0.1  # minimum share of a step's duration that counts as transfer time

# Rows, depth and columns in the arithmetic tests. All dtypes together are 14 kB. The depth is large
# enough to reveal 16-bit accumulation.
_TEST_SIDES: Final = (4, 192, 5)

# Maximum accepted ratio of claimed to measured speed. A probe is not an accurate benchmark.
CLAIM: Final = 10.0
_SPEED_ROWS: Final = 128
_SPEED_SIDES: Final = (128, 512)  # minimum and maximum; smaller matrices are too fast to time
_SPEED_BYTES_S: Final = 0.5  # maximum download time in seconds
_SPEED_UPLOAD_S: Final = 10.0  # on a slower uplink, the speed is not measured
_SPEED_ENOUGH_S: Final = 0.05
_SPEED_PAIRS: Final = 1024


@dataclass(frozen=True, slots=True)
class Effort:
    """Limits that determine how thoroughly a link is measured."""

    round_trips: int  # number of round trips to time. The shortest time is used.
    largest_bytes: int  # maximum size of one transfer
    enough_s: float  # array sizes stop growing after a transfer takes this many seconds


STATED: Final = Effort(0, 0, 0.0)  # for a device that states its link rates, which are not measured
JOINING: Final = Effort(2, 8 * 2**20, 0.1)  # for a device that joins to run tasks
HANDHELD: Final = Effort(2, 2 * 2**20, 0.1)  # for a phone or tablet, whose owner may pay for data

# for a device that joins only to have its link measured
THOROUGH: Final = Effort(5, 8 * 2**20, 0.2)


@dataclass(frozen=True, slots=True)
class _Step:
    """A timed (rows, depth) by (depth, columns) product, computed `pairs` times and summed."""

    rows: int
    depth: int
    columns: int
    pairs: int = 1
    random: bool = False
    again: bool = False  # with the arrays of the step before, which the device still has


@dataclass(frozen=True, slots=True)
class _Test:
    """One matrix multiplication whose result is verified."""

    a: Buffer
    b: Buffer
    out: DType

    @property
    def shape(self) -> tuple[int, int]:
        return self.a.shape[0], self.b.shape[1]


class Probe:
    """The probe of one device. Call `result` with each answer until `rates` or `fault` is set.

    Args:
        device: the rates that the device states.
        rng: secret random generator for the matrices of the tests. None to measure only the link.
        ids: iterator over IDs for arrays and runs, shared by all probes of a session.

    Attributes:
        rates: the link rates, measured or (with `STATED`) as stated; None until the probe ends.
        device: the device's rates for planning; valid once `rates` is set.
        fault: what is wrong with the device's arithmetic; empty if no fault was found.
    """

    def __init__(
        self,
        device: DeviceRates,
        effort: Effort = JOINING,
        rng: random.Random | None = None,
        ids: Iterator[int] | None = None,
    ) -> None:
        self.rates: Measured | None = None
        self.device = device
        self.fault = ""
        self._effort = effort
        self._rng = np.random.default_rng(rng.getrandbits(128)) if rng else None
        self._largest = min(effort.largest_bytes, device.memory_bytes // 4)
        self._ids = ids if ids is not None else count(FIRST_ID)
        self._plan = self._steps()
        self._step = _Step(1, 1, 1)
        self._run = -1
        self._arrays: tuple[int, ...] = ()
        self._sent_s = 0.0
        self._took_s = 0.0  # duration of the previous step
        self._tests: dict[int, _Test] = {}
        self._asked: dict[int, messages.Run] = {}  # unanswered test runs
        self._failures = 0  # failed runs since the last completed run

    def begin(self, now_s: float) -> list[Message]:
        """Start the probe and return the first messages to send to the device."""
        if self._rng is not None:
            return self._send_tests(self._rng)
        return self._go_on(now_s)

    @property
    def measures_link(self) -> bool:
        """Return whether the probe measures the link, instead of using known rates."""
        return self._effort is not STATED

    def awaits(self, run: int) -> bool:
        """Return whether the probe waits for the answer to this run."""
        return run in self._tests or run == self._run

    def failed(self, run: int, now_s: float) -> list[Message]:
        """Return messages that repeat a failed run; none after `ASIDE_AFTER` failures in a row."""
        self._failures += 1
        if self._failures >= ASIDE_AFTER:
            return []
        test = self._tests.pop(run, None)
        if test is None:  # a timed step includes transfers, so send the arrays again
            self._step = replace(self._step, again=False)
            return [messages.Drop(self._arrays), *self._send(self._step, now_s)]
        again = replace(self._asked.pop(run), id=next(self._ids))
        self._tests[again.id], self._asked[again.id] = test, again
        return [again]

    def abandon(self) -> list[Message]:
        """Abandon the probe and return the messages that cancel its runs and drop its arrays."""
        runs, self._tests = tuple(self._tests), {}
        arrays, self._arrays, self._run = self._arrays, (), -1
        return [messages.Cancel(runs), messages.Drop(arrays)]

    @property
    def awaited_bytes(self) -> int:
        """Return the size of the largest result that the probe waits for, in bytes."""
        tests = (test.shape[0] * test.shape[1] * test.out.itemsize for test in self._tests.values())
        return max(DType.FP32.itemsize * self._step.rows * self._step.columns, *tests, 0)

    def result(self, message: messages.Result, now_s: float) -> list[Message]:
        """Handle a result and return the next messages to send to the device.

        Raises:
            ProtocolError: if no such result is awaited, or if its shape or dtype is wrong.
        """
        test = self._tests.pop(message.id, None)
        self._failures = 0
        if test is not None:
            del self._asked[message.id]
            self._expect(message, test.shape, test.out)
            self.fault = self._checked(test, message)
            return [] if self._tests or self.fault else self._go_on(now_s)
        step = self._step
        if message.id != self._run:
            raise _not_awaited(message)
        self._expect(message, (step.rows, step.columns), DType.FP32)
        self._took_s = max(_LEAST_S, now_s - self._sent_s)
        if not step.random:  # only the transfers count
            self._took_s = max(_LEAST_S, self._took_s - message.compute_s)
        return self._go_on(now_s)

    def _go_on(self, now_s: float) -> list[Message]:
        step = next(self._plan, None)
        if step is not None and step.again:
            self._step = step
            return self._ask(step, now_s)
        drop: list[Message] = [messages.Drop(self._arrays)] if self._arrays else []
        self._arrays = ()
        if step is None:
            self._run = -1  # the probe waits for no more results
            return drop
        self._step = step
        return [*drop, *self._send(step, now_s)]

    @staticmethod
    def _expect(message: messages.Result, shape: tuple[int, int], dtype: DType) -> None:
        answer = (message.rows, message.columns, message.dtype, payload_bytes(message.payload))
        if answer != (*shape, dtype.value, shape[0] * shape[1] * dtype.itemsize):
            raise _not_awaited(message)

    # --- arithmetic ---

    def _send_tests(self, rng: np.random.Generator) -> list[Message]:
        sent: list[Message] = []
        rows, depth, columns = _TEST_SIDES
        for dtype in (d for d in DType if d.value in self.device.dtypes):
            a, b = (
                Buffer(narrow(1 + rng.standard_normal(shape, np.float32), dtype), dtype)
                for shape in ((rows, depth), (depth, columns))
            )
            left, right = next(self._ids), next(self._ids)
            self._arrays += (left, right)
            sent += [_put(left, a), _put(right, b)]
            plain, turned = next(self._ids), next(self._ids)
            # One multiplication as stored, and one transposed: (A B)' = B' A', summed twice.
            self._asked[plain] = _run(plain, (left, right), dtype)
            self._asked[turned] = _run(turned, (right, left) * 2, DType.FP32, transposed=True)
            sent += [self._asked[plain], self._asked[turned]]
            self._tests[plain] = _Test(a, b, dtype)
            doubled = (np.concatenate([side.array] * 2, axis=1) for side in (b.T, a))
            twice = [Buffer(array, dtype) for array in doubled]
            self._tests[turned] = _Test(twice[0], twice[1].T, DType.FP32)
        return sent

    def _checked(self, test: _Test, message: messages.Result) -> str:
        assert self._rng is not None
        (rows, columns), depth = test.shape, test.a.shape[1]
        block = Block(Span(0, rows), Span(0, columns), (Span(0, depth),))
        payload = message.payload
        if not isinstance(payload, Buffer):
            payload = unpack(payload, rows, columns, test.out)
        fault = GemmCheck(test.a, test.b, [block], self._rng).judge(block, payload).fault
        if fault is None:
            return ""
        kind = test.a.dtype.value
        return f"a product of {kind} numbers in {test.out.value} is wrong: {fault.reason}"

    # --- times ---

    def _steps(self) -> Iterator[_Step]:
        """Yield products to be timed. The caller stores each product's duration in `_took_s`."""
        stated = self.device
        if not self.measures_link:
            self.rates = Measured(
                stated.downlink_bytes_per_s, stated.uplink_bytes_per_s, stated.latency_s
            )
            return
        round_trip_s = float("inf")
        for _ in range(self._effort.round_trips):
            yield _Step(1, 1, 1)
            round_trip_s = min(round_trip_s, self._took_s)
        by_direction: list[dict[int, float]] = []
        for download in (True, False):
            size, repeated = _FIRST_BYTES, False
            least_s: dict[int, float] = {}  # the shortest duration of a step, by its bytes
            while True:
                side = int((size // 4) ** 0.5)
                step = _Step(1, size // 8, 1) if download else _Step(side, 1, side)
                yield step
                sent = 8 * step.depth if download else 4 * side * side
                # Use the better of two, because disturbances only slow transfers down.
                least_s[sent] = min(self._took_s, least_s.get(sent, self._took_s))
                round_trip_s = min(round_trip_s, self._took_s)
                enough = least_s[sent] - round_trip_s >= self._effort.enough_s
                if enough or size * _GROWTH > self._largest:
                    if repeated:
                        break
                    repeated = True
                else:
                    size, repeated = size * _GROWTH, False
            by_direction.append(least_s)
        rates = [_sustained(least_s, round_trip_s) for least_s in by_direction]
        found = Measured(rates[0], rates[1], round_trip_s / 2)
        if self._rng is not None:
            yield from self._speed(found)
        self.device = replace(
            self.device,
            downlink_bytes_per_s=found.downlink_bytes_per_s,
            uplink_bytes_per_s=found.uplink_bytes_per_s,
            latency_s=found.latency_s,
        )
        self.rates = found

    def _speed(self, link: Measured) -> Iterator[_Step]:
        """Yield products to be timed, until a tenth of the claimed speed or a limit is reached."""
        least, most = _SPEED_SIDES
        nbytes = min(link.downlink_bytes_per_s * _SPEED_BYTES_S, self.device.memory_bytes / 4)
        side = min(most, int((nbytes / DType.FP32.itemsize / 2) ** 0.5))
        down_s = (_SPEED_ROWS + side) * side * DType.FP32.itemsize / link.downlink_bytes_per_s
        up = _SPEED_ROWS * side * DType.FP32.itemsize / link.uplink_bytes_per_s
        if side < least or up > _SPEED_UPLOAD_S:
            return
        claimed, shown, pairs, last = self.device.flops_per_s, 0.0, 1, False
        again = False
        while CLAIM * shown < claimed:
            yield _Step(_SPEED_ROWS, side, side, pairs, random=True, again=again)
            # A step whose run failed sent the arrays, even if the step before had sent them.
            down = down_s if not self._step.again else 0.0
            again = True
            took_s = max(_LEAST_S, self._took_s - 2 * link.latency_s - down - up)
            shown = max(shown, 2 * _SPEED_ROWS * side * side * pairs / took_s)
            if last:
                break
            # The times of the transfers are only known roughly.
            enough_s = max(_SPEED_ENOUGH_S, down + up)
            last = took_s >= enough_s or pairs * _GROWTH > _SPEED_PAIRS
            pairs = pairs if last else pairs * _GROWTH
        if CLAIM * shown < claimed:
            self.device = replace(
                self.device,
                flops_per_s=shown,
                graph_flops_per_s=0.0,
                graph_bf16_flops_per_s=0.0,
            )

    def _send(self, step: _Step, now_s: float) -> list[Message]:
        left, right = next(self._ids), next(self._ids)
        self._arrays = (left, right)
        return [
            _put(left, self._array(step, step.rows, step.depth)),
            _put(right, self._array(step, step.depth, step.columns)),
            *self._ask(step, now_s),
        ]

    def _ask(self, step: _Step, now_s: float) -> list[Message]:
        self._run, self._sent_s = next(self._ids), now_s
        return [_run(self._run, self._arrays * step.pairs, DType.FP32)]

    def _array(self, step: _Step, rows: int, columns: int) -> Buffer:
        if step.random:
            assert self._rng is not None
            return Buffer(self._rng.random((rows, columns), np.float32), DType.FP32)
        return Buffer(np.zeros((rows, columns), np.float32), DType.FP32)


def _sustained(least_s: dict[int, float], round_trip_s: float) -> float:
    """Return a link's sustained rate in bytes/s.

    Args:
        least_s: shortest duration of a step in seconds, by the bytes that the step transfers, in
            ascending order of the bytes.
        round_trip_s: part of each duration that does not depend on the bytes.
    """
    *before, (sent, step_s) = least_s.items()
    rate = sent / max(_LEAST_S, _LEAST_SHARE * step_s, step_s - round_trip_s)
    if before and (more_s := step_s - before[-1][1]) > 0:
        rate = min(rate, (sent - before[-1][0]) / more_s)
    return rate


def _not_awaited(message: messages.Result) -> ProtocolError:
    return ProtocolError(
        f"result {message.id}, {message.rows}x{message.columns} {message.dtype}, "
        f"does not answer the probe"
    )


def _put(id: int, array: Buffer) -> messages.Put:
    return messages.Put(id, *array.shape, array.dtype.value, array)


def _run(id: int, inputs: tuple[int, ...], out: DType, *, transposed: bool = False) -> messages.Run:
    return messages.Run(id, Op.MATMUL.value, inputs, transposed, transposed, out.value)
