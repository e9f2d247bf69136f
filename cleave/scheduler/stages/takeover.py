"""Who takes over a stage that lost a device: as many others as finish it soonest.

Each of them must first be sent the stage's weights, and returns sums of its own at the end, so that
more devices are not always faster. Where sums are large for an uplink, they are divided as well: a
*part* of them is all that some of the devices return, of all micro-batches that they share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cleave.arrays import DType
from cleave.planner.plan import DeviceRates
from cleave.planner.stages.model import PlannedStage
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.device import StageDevice, arrays_of, masks_of, sums_of
from cleave.scheduler.stages.work import (
    LOSS_LAYER,
    LayerWork,
    StepWork,
    SumName,
    SumShape,
    slice_layer,
)

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
    return _soonest(candidates, batches)[0]


def _soonest(candidates: Iterable[Candidate], batches: int) -> tuple[list[int], float]:
    """Return the devices, and when they end, in seconds."""
    chosen: list[int] = []
    speed = begun = 0.0
    for candidate in sorted(candidates, key=lambda c: (c.other_s, c.device)):
        if chosen and candidate.other_s >= (batches + begun) / speed:
            break
        chosen.append(candidate.device)
        speed += 1 / candidate.each_s
        begun += candidate.other_s / candidate.each_s
    return chosen, (batches + begun) / speed if chosen else float("inf")


def soonest_parts(
    candidates: Callable[[int], Sequence[Candidate]], batches: int, most: int
) -> list[list[int]]:
    """Return the devices of each part of a stage's sums, in as many parts as end soonest.

    Args:
        candidates: returns what devices would do if there were so many parts; at least one.
        batches: micro-batches, each of which passes a device of every part.
        most: into how many parts the sums can be divided.
    """
    best: list[list[int]] = []
    best_s = float("inf")
    for parts in range(1, min(most, len(candidates(1))) + 1):
        them = sorted(candidates(parts), key=lambda c: (c.other_s, c.device))
        dealt = [_soonest(them[part::parts], batches) for part in range(parts)]
        if (ends_s := max(end_s for _, end_s in dealt)) < best_s:
            best, best_s = [devices for devices, _ in dealt], ends_s
    return best


@dataclass(frozen=True, slots=True)
class Takeover:
    """What it takes to take over a stage of a step.

    Attributes:
        work: the step.
        stage: the stage.
        returned: which of its sums are wanted.
    """

    work: StepWork
    stage: PlannedStage
    returned: frozenset[SumName]

    def candidate(
        self,
        rates: DeviceRates,
        store: StageDevice | None,
        own_s: float,
        parts: int = 1,
        activations: float = 2.0,
    ) -> Candidate:
        """Return what a device would do.

        Args:
            rates: of the device.
            store: what it holds; None for nothing.
            own_s: how long its own work of this step still takes.
            parts: in how many the sums are divided.
            activations: see `batch_s`.
        """
        missing = sum(
            array.nbytes
            for array in arrays_of(self.work, self.stage)
            if store is None or not store.holds(array)
        )
        other_s = missing / rates.downlink_bytes_per_s + self.sums_s(rates) / parts
        return Candidate(rates.device, own_s + other_s, self.batch_s(rates, activations))

    def sums_s(self, rates: DeviceRates) -> float:
        """Return how long the sums take on a device's uplink."""
        shapes = all_sums(self.work, self.stage)
        sums = sum(shapes[name].nbytes for name in self.returned) // DType.FP32.itemsize
        return sums * DType(self.work.gradients).itemsize / rates.uplink_bytes_per_s

    def divided(self, parts: int) -> list[frozenset[SumName]]:
        """Divide the sums into parts of about the same size."""
        shapes = all_sums(self.work, self.stage)
        found: list[list[SumName]] = [[] for _ in range(parts)]
        sizes = [0] * parts
        for name in sorted(self.returned, key=lambda name: (-shapes[name].nbytes, name)):
            smallest = sizes.index(min(sizes))
            found[smallest].append(name)
            sizes[smallest] += shapes[name].nbytes
        return [frozenset(part) for part in found]

    @property
    def flops(self) -> float:
        """Return what a token takes, forward and backward."""
        flops: float = sum(layer.forward_flops + layer.backward_flops for layer in self._layers())
        if self.stage.loss and self.work.loss is not None:
            flops += self.work.loss.flops
        if self.stage.slice is not None:
            part = self.work.slice_works[self.stage.slice.number]
            flops += part.forward_flops + part.backward_flops
        return flops

    def batch_s(self, rates: DeviceRates, activations: float = 2.0) -> float:
        """Return how long a micro-batch takes a device, forward and backward.

        Args:
            rates: of the device.
            activations: that it returns on average: its output, and the gradient of its input,
                unless these are known.
        """
        count = len(self.work.tokens)
        tokens = sum(self.work.tokens) / count
        activation = sum(x.nbytes for x in self.work.x) / count
        again = sum(layer.forward_flops for layer in self._layers())
        return max(
            (self.flops + again) * tokens / rates.flops_per_s,
            _PASSES * activation / rates.downlink_bytes_per_s,
            activations * activation / rates.uplink_bytes_per_s,
            1e-9,
        )

    def fits(self, rates: DeviceRates, store: StageDevice | None) -> bool:
        """Say whether a device has memory for the stage beside what it holds."""
        held = 0 if store is None else store.occupied_bytes
        sums = sum(shape.nbytes for shape in all_sums(self.work, self.stage).values())
        activations = max(self.work.tokens) * self.work.width * DType.FP32.itemsize
        inputs = self.stage.stop - self.stage.first + (self.stage.slice is not None)
        arrays = list(arrays_of(self.work, self.stage))
        widened = [
            DType.FP32.itemsize * array.rows * array.columns
            for array in arrays
            if isinstance(array, StageArray) and array.dtype in _NARROW
        ]
        needed = sum(array.nbytes for array in arrays) + max(widened, default=0)
        needed += sums + (inputs + 4) * activations
        if any(layer.of_batch for layer in self._layers()):
            layers = range(self.stage.first, self.stage.stop)
            needed += max(
                sum(mask.nbytes for mask in masks_of(self.work, layers, batch))
                for batch in range(len(self.work.tokens))
            )
        return held + needed <= rates.memory_bytes

    def _layers(self) -> Sequence[LayerWork]:
        return self.work.layers[self.stage.first : self.stage.stop]


def all_sums(work: StepWork, stage: PlannedStage) -> dict[SumName, SumShape]:
    """Return the sums of a stage, with those of the loss, or its slice, if it computes that."""
    numbers = [*range(stage.first, stage.stop)]
    if stage.loss:
        numbers.append(LOSS_LAYER)
    if stage.slice is not None:
        numbers.append(slice_layer(stage.slice.number))
    return {
        (number, name): shape for number in numbers for name, shape in sums_of(work, number).items()
    }
