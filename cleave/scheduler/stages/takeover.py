"""Select the devices that take over a stage after a device is lost.

The set of devices with the earliest predicted finish is selected. Each new device must first
receive the stage's weights and must return gradient sums at the end, so more devices are not always
faster. If it leads to an earlier finish, the gradient sums are divided into parts. The devices of
each part together process all micro-batches but return only the sums of their part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cleave.arrays import DType
from cleave.planner.plan import DeviceRates
from cleave.planner.stages.model import PlannedStage
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.device import StageDevice
from cleave.scheduler.stages.passes import arrays_of, masks_of, sums_of
from cleave.scheduler.stages.work import (
    LayerWork,
    StepWork,
    SumName,
    SumShape,
    layers_of,
    slice_layer,
)

_NARROW = (DType.BF16.value, DType.FP16.value)  # dtypes that graphs upcast to fp32
_PASSES = 3  # activations sent to a device for each micro-batch: x twice, dy once


@dataclass(frozen=True, slots=True)
class Candidate:
    """A device that could run some of a stage's micro-batches."""

    device: int
    # predicted seconds for its other tasks, receiving weights and returning this stage's sums
    other_s: float
    each_s: float  # predicted seconds for each micro-batch


def soonest(candidates: Iterable[Candidate], batches: int) -> list[int]:
    """Return the set of devices that is predicted to finish `batches` micro-batches earliest.

    By time t, the selected devices together complete sum((t - other_s) / each_s) micro-batches. A
    device is selected if its `other_s` is less than the predicted finish time.
    """
    return _soonest(candidates, batches)[0]


def _soonest(candidates: Iterable[Candidate], batches: int) -> tuple[list[int], float]:
    """Return the result of `soonest`, and the predicted finish time in seconds."""
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
    """Choose the number of parts of a stage and each part's devices, for the earliest finish.

    Args:
        candidates: returns the candidates for a given number of parts.
        batches: number of micro-batches. The devices of each part together process all of them.
        most: maximum number of parts.

    Returns:
        A list of devices for each part; an empty list if no candidates exist.
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
    """Predicts the time that a device needs to take over a stage.

    `returned` contains the names of the gradient sums that the device must return.
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
        """Return a `Candidate` for a device, with its predicted times for this stage.

        Args:
            store: the record of the device's arrays; None if the device holds no arrays.
            own_s: predicted time of the device's other tasks in this step, in seconds.
            parts: number of parts into which the gradient sums are divided.
            activations: average number of activations that the device returns for each micro-batch.
        """
        missing = sum(
            array.nbytes
            for array in arrays_of(self.work, self.stage)
            if store is None or not store.holds(array)
        )
        other_s = missing / rates.downlink_bytes_per_s + self.sums_s(rates) / parts
        return Candidate(rates.device, own_s + other_s, self.batch_s(rates, activations))

    def sums_s(self, rates: DeviceRates) -> float:
        """Return the predicted upload time of the gradient sums, in seconds."""
        shapes = all_sums(self.work, self.stage)
        sums = sum(shapes[name].nbytes for name in self.returned) // DType.FP32.itemsize
        return sums * DType(self.work.gradients).itemsize / rates.uplink_bytes_per_s

    def divided(self, parts: int) -> list[frozenset[SumName]]:
        """Divide the gradient sums in `returned` into `parts` sets of similar size in bytes."""
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
        """Return the FLOPs per token of both passes, without recomputation of layer inputs."""
        flops: float = sum(layer.forward_flops + layer.backward_flops for layer in self._layers())
        if self.stage.loss and self.work.loss is not None:
            flops += self.work.loss.flops
        if self.stage.slice is not None:
            part = self.work.slice_works[self.stage.slice.number]
            flops += 2 * part.forward_flops + part.backward_flops  # the logits are recomputed
        return flops

    def batch_s(self, rates: DeviceRates, activations: float = 2.0) -> float:
        """Return a device's predicted time for both passes of a micro-batch, in seconds.

        Args:
            activations: average number of activations that the device returns for each micro-batch.
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
        """Return whether the stage fits in a device's free memory."""
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
        resident = () if self.work.resident is None else self.work.resident.of_stage(self.stage)
        updated = (one.weight.nbytes * (1 + len(one.moments)) for _, one in resident)
        needed += sums + max((inputs + 4) * activations, max(updated, default=0))
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
    """Return the shapes of a stage's gradient sums, including those of its loss or loss slice."""
    numbers = layers_of(stage)
    if stage.slice is not None:
        numbers.append(slice_layer(stage.slice.number))
    return {
        (number, name): shape for number in numbers for name, shape in sums_of(work, number).items()
    }
