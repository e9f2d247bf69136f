"""Convert differences and changes of weights to the arrays that devices exchange, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from cleave import graph_names as names
from cleave.arrays import Array, DType, unpack
from cleave.graphs.exchange_graphs import (
    added_graph,
    block_of,
    coded_added_graph,
    coded_difference_graph,
    codes_from,
    codes_of,
    dequantized,
    difference_graph,
    quantized,
)
from cleave.planner.local_updates import ExchangeKind
from cleave.scheduler.rounds.work import ExchangeWork, Returned
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.work import StageGraph
from cleave.scheduler.traffic import TrafficKind

_MOST_CODES: Final = 255 * 2**20  # codes are not floating-point, so they travel in one message


def returned(kind: ExchangeKind, rows: int, columns: int) -> list[Returned]:
    """Return the arrays in which devices return the difference of a matrix."""
    elements = rows * columns
    block = _block(kind, elements)
    if not block:
        out = DType.FP32 if kind is ExchangeKind.FP32 else DType.BF16
        return [Returned(names.GRADIENT, rows, columns, out.value)]
    # Rows of about the matrix's size, because large arrays are returned some rows at a time.
    return [
        Returned(names.CODES, elements // block, block // 2, DType.FP16.value),
        Returned(names.SCALES, elements // block, 1, DType.FP32.value),
    ]


def _block(kind: ExchangeKind, elements: int) -> int:
    """Return the number of elements with one scale; 0 without scales."""
    small = kind is ExchangeKind.INT8 and elements <= _MOST_CODES
    return block_of(elements) if small else 0


class Exchange:
    """Converts between changes of weights and the arrays that devices exchange.

    Args:
        graph: returns a graph in the wire format.
        array: returns a tensor as an array in the wire format and the given dtype.
    """

    def __init__(
        self,
        kind: ExchangeKind,
        graph: Callable[[bytes], StageGraph],
        array: Callable[[Tensor, DType], StageArray],
    ) -> None:
        self.kind = kind
        self._graph, self._array = graph, array

    def work(self, weight: StageArray) -> ExchangeWork:
        """Return the graphs with which devices exchange a parameter."""
        block = _block(self.kind, weight.rows * weight.columns)
        difference = coded_difference_graph(block) if block else difference_graph()
        added = coded_added_graph(block) if block else added_graph()
        out = returned(self.kind, weight.rows, weight.columns)
        return ExchangeWork(self._graph(difference), out, self._graph(added))

    def difference(self, work: ExchangeWork, found: Mapping[str, Sequence[Any]]) -> Array:
        """Return a parameter's difference as an fp32 vector, given what a device returned."""
        arrays = {each.name: _joined(each, found[each.name]) for each in work.returned}
        if names.GRADIENT in arrays:
            return arrays[names.GRADIENT]
        return dequantized(codes_of(arrays[names.CODES]), arrays[names.SCALES])

    def update(self, change: Tensor) -> tuple[Tensor, Mapping[str, StageArray]]:
        """Return the change of a parameter after rounding, and the arrays to send."""
        block = _block(self.kind, change.numel())
        if not block:
            dtype = DType.FP32 if self.kind is ExchangeKind.FP32 else DType.BF16
            seen = change if dtype is DType.FP32 else change.bfloat16().float()
            return seen, {names.GRADIENT: self._array(seen, dtype)}
        codes, scales = quantized(change.numpy().reshape(-1), block)
        seen = torch.from_numpy(dequantized(codes_from(codes), scales)).reshape(change.shape)
        payload = memoryview(codes.tobytes())
        sent = StageArray(1, codes.size, "uint8", payload, TrafficKind.WEIGHTS)
        return seen, {
            names.CODES: sent,
            names.SCALES: self._array(torch.from_numpy(scales), DType.FP32),
        }


def _joined(of: Returned, payloads: Sequence[Any]) -> Array:
    """Return the elements of a returned array, fp32, given its rows in order."""
    dtype = DType(of.dtype)
    each = of.columns * dtype.itemsize
    parts = [unpack(p, len(p) // each, of.columns, dtype).float32() for p in payloads]
    found: Array = np.concatenate(parts).reshape(-1)
    return found
