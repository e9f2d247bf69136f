"""Parameter gradients of a step by stages, summed from the gradient sums that devices return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cleave import arrays
from cleave.arrays import DType
from cleave.planner.stages.model import HeadSlice
from cleave.scheduler.stages.work import LOSS_LAYER, SumName, slice_of_layer
from cleave.training.stages.stage_work import ModelWork, sum_shape


@dataclass(eq=False)
class StepGradients:
    """Adds up the gradient sums of one step in fp32. Stages may be read in any order.

    Args:
        dtype: dtype in which devices return gradient sums.
        slices: slices of the loss; empty if the loss is not vocabulary-parallel.
        buffers: memory of earlier steps' gradients, by parameter `id`. It is reused, because
            allocating memory takes longer than adding. None if the caller keeps the gradients.
    """

    work: ModelWork
    dtype: DType
    slices: Sequence[HeadSlice] = ()
    buffers: dict[int, Tensor] | None = None
    _read: set[SumName] = field(init=False, default_factory=set)
    # For each parameter `id`: the gradients from each layer that has the parameter.
    _found: dict[int, dict[int, Tensor]] = field(init=False, default_factory=dict)

    def read(self, gradients: Mapping[SumName, Sequence[Sequence[Any]]]) -> None:
        """Read all gradient sums of a stage or a step that have not been read yet."""
        for key in gradients.keys() - self._read:
            self._read.add(key)
            layer, name = key
            parameter = self.work.held(layer)[name]
            part = self._part(layer)
            found = self._found.setdefault(id(parameter), {})
            cut = part is not None and name in self.work.graphs_of_slice(part).cut
            place = LOSS_LAYER if cut else layer  # slices return different rows of one gradient
            if place not in found:
                found[place] = self._memory(parameter, found)
            mine = found[place]
            if cut and part is not None:
                mine = mine[slice(*part.rows(self.work.vocabulary))]
            shape = sum_shape(mine)
            total = mine.numpy().reshape(shape.rows, shape.columns)
            _add_up(gradients[key], total, self.dtype)

    def total(self) -> dict[int, Tensor]:
        """Return the gradients by parameter `id`. Call this once, after reading all sums."""
        return {key: _in_order(found) for key, found in self._found.items()}

    def _part(self, layer: int) -> HeadSlice | None:
        number = slice_of_layer(layer)
        return None if number is None else self.slices[number]

    def _memory(self, parameter: Tensor, found: Mapping[int, Tensor]) -> Tensor:
        """Return memory for a gradient: a buffer, unless another layer's gradient uses it."""
        buffers = {} if self.buffers is None or found else self.buffers
        held = buffers.get(id(parameter))
        if held is None or held.shape != parameter.shape:
            held = buffers[id(parameter)] = torch.empty(parameter.shape, dtype=torch.float32)
        return held


def add_gradients(model: nn.Module, found: Mapping[int, Tensor]) -> None:
    """Add gradients, keyed by parameter `id`, to the `grad` of a model's parameters.

    The tensors in `found` become the parameters' gradients.
    """
    for parameter in model.parameters():
        mine = found.get(id(parameter))
        if mine is not None:
            parameter.grad = mine if parameter.grad is None else mine.add_(parameter.grad)


def _in_order(found: Mapping[int, Tensor]) -> Tensor:
    """Add up one parameter's gradients from several layers, in layer order with the loss last.

    Because of the fixed order, rounding does not depend on which stage finishes first.
    """
    first, *others = (found[layer] for layer in sorted(found, key=lambda n: (n < 0, abs(n))))
    for other in others:
        first += other
    return first


def _add_up(groups: Sequence[Sequence[Any]], total: arrays.Array, dtype: DType) -> None:
    """Add up the devices' gradient sums of one parameter, and write the result to `total`.

    Each element of `groups` is one device's sum, as a sequence of blocks of consecutive rows.
    """
    if not groups:
        total[...] = 0
    columns = total.shape[1]
    for number, parts in enumerate(groups):
        first = 0
        for part in parts:
            rows = memoryview(part).nbytes // (columns * dtype.itemsize)
            values = arrays.unpack(part, rows, columns, dtype).float32()
            if number:
                total[first : first + rows] += values
            else:  # copying is faster than adding to zeros, which reads and writes the memory again
                total[first : first + rows] = values
            first += rows
        assert first == len(total)
