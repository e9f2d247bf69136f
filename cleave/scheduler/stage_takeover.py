"""Who takes over a stage that lost a device: as many others as finish it soonest.

Each of them must first be sent the stage's weights, and returns sums of its own at the end, so that
more devices are not always faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cleave.arrays import DType
from cleave.planner.plan import DeviceRates
from cleave.planner.stages import PlannedStage
from cleave.scheduler.stage_device import StageDevice, arrays_of, sums_of
from cleave.scheduler.stage_work import LOSS_LAYER, LayerWork, StageArray, StepWork, SumShape

_NARROW = (DType.BF16.value, DType.FP16.value)  # which graphs compute in fp32
_PASSES = 3  # activations that a device is sent for a micro-batch: x twice, and dy


@dataclass(frozen=True, slots=True)
class Candidate:
    """A device that could take over micro-batches.

    Attributes:
        device: which.
        other_s: what else it does: its own work, and weights and sums of this stage on its links.
        each_s: how long a micro-batch takes it.
    """

    device: int
    other_s: float
    each_s: float


def soonest(candidates: Iterable[Candidate], batches: int) -> list[int]:
    """Return the devices that do so many micro-batches soonest, if each takes what it can.

    Devices that end at the same time t do sum((t - other_s) / each_s) micro-batches, so those are
    chosen whose other work ends before t.
    """
    chosen: list[int] = []
    speed = begun = 0.0
    for candidate in sorted(candidates, key=lambda c: (c.other_s, c.device)):
        if chosen and candidate.other_s >= (batches + begun) / speed:
            break
        chosen.append(candidate.device)
        speed += 1 / candidate.each_s
        begun += candidate.other_s / candidate.each_s
    return chosen


@dataclass(frozen=True, slots=True)
class Takeover:
    """What it takes to take over a stage of a step.

    Attributes:
        work: the step.
        stage: the stage.
    """

    work: StepWork
    stage: PlannedStage

    def candidate(self, rates: DeviceRates, store: StageDevice | None, own_s: float) -> Candidate:
        """Return what a device would do.

        Args:
            rates: of the device.
            store: what it holds; None for nothing.
            own_s: how long its own work of this step still takes.
        """
        missing = sum(
            array.nbytes
            for array in arrays_of(self.work, self.stage)
            if store is None or not store.holds(array)
        )
        sums = sum(shape.nbytes for shape in self._sums()) // DType.FP32.itemsize
        sums *= DType(self.work.gradients).itemsize
        other_s = missing / rates.downlink_bytes_per_s + sums / rates.uplink_bytes_per_s
        return Candidate(rates.device, own_s + other_s, self.batch_s(rates))

    def batch_s(self, rates: DeviceRates) -> float:
        """Return how long a micro-batch takes a device, forward and backward."""
        count = len(self.work.tokens)
        tokens = sum(self.work.tokens) / count
        activation = sum(x.nbytes for x in self.work.x) / count
        flops = sum(2 * layer.forward_flops + layer.backward_flops for layer in self._layers())
        if self.stage.loss and self.work.loss is not None:
            flops += self.work.loss.flops
        return max(
            flops * tokens / rates.flops_per_s,
            _PASSES * activation / rates.downlink_bytes_per_s,
            2 * activation / rates.uplink_bytes_per_s,
            1e-9,
        )

    def fits(self, rates: DeviceRates, store: StageDevice | None) -> bool:
        """Say whether a device has memory for the stage beside what it holds."""
        held = 0 if store is None else store.occupied_bytes
        sums = sum(shape.nbytes for shape in self._sums())
        activations = max(self.work.tokens) * self.work.width * DType.FP32.itemsize
        layers = self.stage.stop - self.stage.first
        arrays = list(arrays_of(self.work, self.stage))
        widened = [
            DType.FP32.itemsize * array.rows * array.columns
            for array in arrays
            if isinstance(array, StageArray) and array.dtype in _NARROW
        ]
        needed = sum(array.nbytes for array in arrays) + max(widened, default=0)
        needed += sums + (layers + 4) * activations
        return held + needed <= rates.memory_bytes

    def _layers(self) -> Sequence[LayerWork]:
        return self.work.layers[self.stage.first : self.stage.stop]

    def _sums(self) -> Iterator[SumShape]:
        numbers = [*range(self.stage.first, self.stage.stop)]
        if self.stage.loss:
            numbers.append(LOSS_LAYER)
        for number in numbers:
            yield from sums_of(self.work, number).values()
