"""What devices return for stages and stands out is computed again here before it is used.

`cleave.scheduler.stages.step` holds back numbers that are not finite or much larger than usual, and
those of which nothing is known yet. Here they are computed again. An honest device is never
blamed: numbers are wrong only where all of this holds.

- What the device was given, weights included, is finite and not so large that a product may
  overflow in one order of summing and not in another.
- What is computed here is finite.
- What the device returned is not finite, or is off by half of the largest element or more, and
  nothing like that comes of inputs that are moved by rounding.

Where the inputs, or what is computed here, are not finite, the run diverges and nobody is to blame.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cleave import arrays
from cleave.arrays import Array, Buffer, DType
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.outcomes import SumsRecord, Suspect
from cleave.scheduler.stages.usual_sizes import FAR, Place, Returned
from cleave.scheduler.stages.work import LOSS_LAYER, StepWork, SumName
from cleave.training.stages.audits import Auditor
from cleave.training.stages.honest_error import MOST_REPEATS, error_of

LARGEST_INPUT: Final = 2.0**20
"""Where an input or a weight is larger, nobody is blamed: a product of a few may overflow."""

_GROSS: Final = 0.5
"""Nobody is blamed for less, as a share of the largest element: that is what audits are for."""

_STEADY: Final = 0.1
"""Numbers that rounding moves by more than this share of the largest element prove nothing."""

_BEYOND: Final = 1000.0
"""Unless they are off by so many times as much: a gradient may consist of rounding alone."""

_OTHERS: Final = 10.0
"""So much larger may the gradient of one micro-batch be than that of another."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Says what numbers that stood out are.

    Attributes:
        right: whether to use them; else another device is asked.
        reason: what is wrong with them; empty if they are right.
        proven: whether the device is to blame.
    """

    right: bool
    reason: str = ""
    proven: bool = False


_RIGHT: Final = Finding(True)


def examined(work: StepWork, suspect: Suspect, auditor: Auditor) -> Finding:
    """Compute again what a device returned; say whether it is right.

    Args:
        work: the step.
        suspect: what the device was given, and returned.
        auditor: repeats passes.
    """
    largest_input = _largest_input(work, suspect)
    if not math.isfinite(largest_input):
        return _RIGHT
    sums = suspect.record.sums[0] if suspect.record.sums else None
    if sums is not None and _is_like_one_batch(work, suspect, sums, auditor):
        return _RIGHT
    repeat, passes = _repeater(work, suspect, auditor)
    wanted = repeat(None)
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
    generator = np.random.default_rng()
    for _ in range(max(2, MOST_REPEATS // passes) if finite else 0):
        again = repeat(generator)
        for place in wrong:
            moved_by = _size(error_of(again[place], wanted[place]))
            steady &= moved_by <= max(_STEADY * scales[place], off[place] / _BEYOND)
            most[place] = max(most[place], _size(again[place]))
        if not steady:
            break
    place = wrong[0]
    reason = (
        f"{_words(place, suspect)} of {suspect.record.plan.named} has an element of "
        f"{suspect.sizes[place]:.3g}, where the largest one is {scales[place]:.3g}"
    )
    if steady and largest_input <= LARGEST_INPUT:
        return Finding(False, reason, proven=True)
    if all(suspect.sizes[p] <= FAR * most[p] for p in wrong):
        return _RIGHT
    return Finding(False, reason)


def _repeater(
    work: StepWork, suspect: Suspect, auditor: Auditor
) -> tuple[Callable[[np.random.Generator | None], dict[Place, Array]], int]:
    """Return a function that computes again what stands out, and of how many passes it consists."""
    record, places = suspect.record, list(suspect.sizes)

    def sums_again(random: np.random.Generator | None) -> dict[Place, Array]:
        totals: dict[SumName, Array] = {}
        for batch in sorted(record.sums[0].batches):
            auditor.repeat(work, record, batch, totals, random)
        return {place: totals[_sum_name(place)] for place in places}

    def pass_again(random: np.random.Generator | None) -> dict[Place, Array]:
        (batch,) = record.x
        if record.y:
            return {places[0]: auditor.output(work, record, batch, random)}
        _, dx, loss = auditor.repeat(work, record, batch, {}, random)
        made = {Returned.GRADIENT: dx, Returned.LOSS: loss}
        return {place: np.asarray(made[place[0]]) for place in places}

    return (sums_again, len(record.sums[0].batches)) if record.sums else (pass_again, 1)


def _is_like_one_batch(
    work: StepWork, suspect: Suspect, sums: SumsRecord, auditor: Auditor
) -> bool:
    """Say whether sums are as large as the gradients of one of their micro-batches explain.

    That takes one pass, where all of them take as many as there are micro-batches.
    """
    count = len(sums.batches)
    if count == 1 or not all(map(math.isfinite, suspect.sizes.values())):
        return False
    totals: dict[SumName, Array] = {}
    batch = random.SystemRandom().choice(sorted(sums.batches))
    auditor.repeat(work, suspect.record, batch, totals, None)
    return all(
        size <= _OTHERS * count * _size(totals[_sum_name(place)])
        for place, size in suspect.sizes.items()
    )


def _found(work: StepWork, suspect: Suspect, wanted: Mapping[Place, Array]) -> dict[Place, Array]:
    """Return what the device returned, shaped as what was computed here."""
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
    """Return the largest magnitude of what the device computed with; NaN or infinity if any is."""
    sizes = [_array_size(array) for array in _inputs(work, suspect)]
    return math.nan if any(map(math.isnan, sizes)) else max(sizes)


def _inputs(work: StepWork, suspect: Suspect) -> Iterator[StageArray]:
    """Yield what the device computed with: activations, gradients and weights."""
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
    """Return the largest magnitude of an array; 0 of one of indices or codes."""
    if array.dtype not in {dtype.value for dtype in DType}:
        return 0.0
    payload: Any = array.payload
    data = payload.pack() if isinstance(payload, Buffer) else payload
    return arrays.largest(data, DType(array.dtype))


def _size(values: Array) -> float:
    return float(np.abs(values).max(initial=0.0))


def _words(place: Place, suspect: Suspect) -> str:
    """Return in words what was returned."""
    what, parameter, layer = place
    if what is Returned.SUM:
        of = f"layer {layer}'s " if layer > LOSS_LAYER else ""
        return f"{what.value} of {of}{parameter}"
    (batch,) = suspect.record.x
    return f"{what.value} of micro-batch {batch}"
