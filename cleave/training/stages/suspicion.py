"""Checks of suspicious device results: the PS recomputes a result before training uses it.

`cleave.scheduler.stages.step` withholds a result that is not finite or is much larger than usual,
or whose usual magnitude is not yet known. A device is blamed only if all of these conditions hold:

- The device's inputs and weights are finite, and so small that the order of summation cannot
  decide whether a matrix product overflows.
- The local result is finite. Otherwise, the training run is diverging.
- The device's result is not finite, or its error exceeds half of the largest local element.
- If the device's error is finite, coarser rounding changes the local result by much less.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from cleave import arrays
from cleave.arrays import Array, Buffer, DType
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.outcomes import SumsRecord, Suspect
from cleave.scheduler.stages.usual_sizes import FAR, Place, Returned
from cleave.scheduler.stages.work import LOSS_LAYER, StepWork, SumName
from cleave.training.stages.audits import Auditor, Rounding, roundings
from cleave.training.stages.honest_error import MOST_REPEATS, error_of

# Largest input or weight for which a device may be blamed. Products of larger values may overflow.
LARGEST_INPUT: Final = 2.0**20

# `_GROSS` and `_STEADY` are fractions of the largest element.
_GROSS: Final = 0.5  # smallest error that counts as wrong; only audits detect smaller errors
_STEADY: Final = 0.1  # an error proves a fault if coarser rounding has at most this effect
_BEYOND: Final = 1000.0  # or if the error is at least this many times the effect

_OTHERS: Final = 10.0  # largest plausible ratio between the gradients of two micro-batches


@dataclass(frozen=True, slots=True)
class Finding:
    """Outcome of checking a suspicious result.

    Attributes:
        right: whether training uses the result. If not, another device recomputes it.
        reason: description of the error; empty if `right` is True.
        proven: whether the check proves that the device is faulty.
    """

    right: bool
    reason: str = ""
    proven: bool = False


_RIGHT: Final = Finding(True)


def examined(work: StepWork, suspect: Suspect, auditor: Auditor) -> Finding:
    """Check a suspicious result by recomputing it on the PS with `auditor`."""
    largest_input = _largest_input(work, suspect)
    if not math.isfinite(largest_input):
        return _RIGHT
    sums = suspect.record.sums[0] if suspect.record.sums else None
    if sums is not None and _is_like_one_batch(work, suspect, sums, auditor):
        return _RIGHT
    repeat, passes = _repeater(work, suspect, auditor)
    for rounding in roundings(work):
        wanted = repeat(rounding)
        found = _found(work, suspect, wanted)
        if not all(np.isfinite(each).all() for each in wanted.values()):
            return _RIGHT
        scales = {place: _size(each) for place, each in wanted.items()}
        off = {place: _size(error_of(found[place], wanted[place])) for place in wanted}
        wrong = [p for p in wanted if off[p] > _GROSS * scales[p]]
        if not wrong:
            return _RIGHT
    finite = all(np.isfinite(found[place]).all() for place in wrong)
    most = {place: scales[place] for place in wrong}
    steady = True
    coarser = replace(rounding, noise=np.random.default_rng())
    for _ in range(max(2, MOST_REPEATS // passes) if finite else 0):
        again = repeat(coarser)
        for place in wrong:
            moved_by = _size(error_of(again[place], wanted[place]))
            steady &= moved_by <= max(_STEADY * scales[place], off[place] / _BEYOND)
            most[place] = max(most[place], _size(again[place]))
        if not steady:
            break
    place = wrong[0]
    reason = (
        f"{_words(place, suspect)} of {suspect.record.plan.named} has an element of magnitude "
        f"{suspect.sizes[place]:.3g}, but the largest correct element is {scales[place]:.3g}"
    )
    if steady and largest_input <= LARGEST_INPUT:
        return Finding(False, reason, proven=True)
    if all(suspect.sizes[p] <= FAR * most[p] for p in wrong):
        return _RIGHT
    return Finding(False, reason)


def _repeater(
    work: StepWork, suspect: Suspect, auditor: Auditor
) -> tuple[Callable[[Rounding], dict[Place, Array]], int]:
    """Return a function that recomputes a suspicious result, and its number of passes per call."""
    record, places = suspect.record, list(suspect.sizes)

    def sums_again(rounding: Rounding) -> dict[Place, Array]:
        totals: dict[SumName, Array] = {}
        for batch in sorted(record.sums[0].batches):
            auditor.repeat(work, record, batch, totals, rounding)
        return {place: totals[_sum_name(place)] for place in places}

    def pass_again(rounding: Rounding) -> dict[Place, Array]:
        (batch,) = record.x
        if record.y:
            return {places[0]: auditor.output(work, record, batch, rounding)}
        _, dx, loss = auditor.repeat(work, record, batch, {}, rounding)
        made = {Returned.GRADIENT: dx, Returned.LOSS: loss}
        return {place: np.asarray(made[place[0]]) for place in places}

    return (sums_again, len(record.sums[0].batches)) if record.sums else (pass_again, 1)


def _is_like_one_batch(
    work: StepWork, suspect: Suspect, sums: SumsRecord, auditor: Auditor
) -> bool:
    """Return True if gradient sums are plausible compared with one random micro-batch's gradients.

    For n micro-batches, a sum may be up to `_OTHERS` * n times the micro-batch's gradient.
    """
    count = len(sums.batches)
    if count == 1 or not all(map(math.isfinite, suspect.sizes.values())):
        return False
    totals: dict[SumName, Array] = {}
    batch = random.SystemRandom().choice(sorted(sums.batches))
    auditor.repeat(work, suspect.record, batch, totals, Rounding())
    return all(
        size <= _OTHERS * count * _size(totals[_sum_name(place)])
        for place, size in suspect.sizes.items()
    )


def _found(work: StepWork, suspect: Suspect, wanted: Mapping[Place, Array]) -> dict[Place, Array]:
    """Return the device's results as fp32 arrays with the shapes of the local results `wanted`."""
    record, found = suspect.record, {}
    for place, each in wanted.items():
        parts: list[Any]
        dtype = DType(work.dtype)
        match place[0]:
            case Returned.SUM:
                keys = sorted(k for k in record.sums[0].found if k[:2] == _sum_name(place))
                parts, dtype = [record.sums[0].found[k] for k in keys], DType(work.gradients)
            case Returned.OUTPUT:
                parts = list(record.y.values())
                dtype = dtype if record.plan.slice is None else DType.FP32
            case Returned.GRADIENT:
                parts = list(record.dx.values())
            case Returned.LOSS:
                parts, dtype = list(suspect.losses.values()), DType.FP32
        values = [
            arrays.unpack(part, 1, memoryview(part).nbytes // dtype.itemsize, dtype).float32()
            for part in parts
        ]
        found[place] = np.concatenate(values, axis=1).reshape(each.shape)
    return found


def _sum_name(place: Place) -> SumName:
    _, parameter, layer = place
    return layer, parameter


def _largest_input(work: StepWork, suspect: Suspect) -> float:
    """Return the largest magnitude of the device's inputs and weights; NaN if any value is NaN."""
    sizes = [_array_size(array) for array in _inputs(work, suspect)]
    return math.nan if any(map(math.isnan, sizes)) else max(sizes)


def _inputs(work: StepWork, suspect: Suspect) -> Iterator[StageArray]:
    """Yield the arrays that the device received: activations, output gradients and weights."""
    record, plan = suspect.record, suspect.record.plan
    yield from record.x.values()
    if not record.y:
        yield from record.dy.values()
    for layer in work.layers[plan.first : plan.stop]:
        yield from layer.parameters.values()
    if plan.loss and work.loss is not None:
        yield from work.loss.parameters.values()
    if plan.slice is not None:
        yield from work.slice_works[plan.slice.number].parameters.values()


def _array_size(array: StageArray) -> float:
    """Return the largest magnitude of an array's elements; 0 for indices and quantized codes."""
    if array.dtype not in {dtype.value for dtype in DType}:
        return 0.0
    payload: Any = array.payload
    data = payload.pack() if isinstance(payload, Buffer) else payload
    return arrays.largest(data, DType(array.dtype))


def _size(values: Array) -> float:
    return float(np.abs(values).max(initial=0.0))


def _words(place: Place, suspect: Suspect) -> str:
    what, parameter, layer = place
    if what is Returned.SUM:
        of = f"layer {layer}'s " if layer > LOSS_LAYER else ""
        return f"{what.value} of {of}{parameter}"
    (batch,) = suspect.record.x
    return f"{what.value} of micro-batch {batch}"
