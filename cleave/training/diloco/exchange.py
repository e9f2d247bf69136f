"""Convert differences and changes of weights to the arrays that devices exchange, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

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
from cleave.graphs.sparse_graphs import (
    Chunks,
    changed,
    sparse_added_graph,
    sparse_change,
    sparse_difference,
    sparse_difference_graph,
)
from cleave.machine.graph_memory import GivenInput, GraphMemory
from cleave.planner.local_updates import ExchangeKind
from cleave.scheduler.counters import TrafficKind
from cleave.scheduler.rounds.work import ExchangeWork, Returned
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.work import StageGraph

Found: TypeAlias = Mapping[str, Sequence[Any]]
"""The rows of each array that a device returned for a parameter, in order."""

_MOST_CODES: Final = 255 * 2**20  # codes are not floating-point, so they are sent in one message


def returned(kind: ExchangeKind, rows: int, columns: int) -> list[Returned]:
    """Return the arrays in which devices return the difference of a matrix."""
    elements = rows * columns
    match _form(kind, elements):
        case Chunks() as chunks:
            return [
                Returned(names.CODES, chunks.rows, chunks.kept, DType.FP16.value),
                Returned(names.SCALES, chunks.rows, 2, DType.FP32.value),
            ]
        case DType() as dtype:
            return [Returned(names.GRADIENT, rows, columns, dtype.value)]
        case block:
            # Rows of about the matrix's size, because large arrays are returned some rows at a
            # time.
            return [
                Returned(names.CODES, elements // block, block // 2, DType.FP16.value),
                Returned(names.SCALES, elements // block, 1, DType.FP32.value),
            ]


def _form(kind: ExchangeKind, elements: int) -> Chunks | DType | int:
    """Return how a parameter is sent: in chunks, in a dtype, or in blocks of elements."""
    if kind is ExchangeKind.FP32:
        return DType.FP32
    if kind is ExchangeKind.SPARSE and elements <= _MOST_CODES:
        return Chunks.of(elements)
    small = kind is ExchangeKind.INT8 and elements <= _MOST_CODES
    return block_of(elements) if small and block_of(elements) else DType.BF16


@dataclass(frozen=True, slots=True)
class Exchange:
    """Converts between changes of weights and the arrays that devices exchange.

    Args:
        graph: returns a graph in the wire format.
        array: returns a tensor as an array in the wire format and the given dtype.
    """

    kind: ExchangeKind
    graph: Callable[[bytes], StageGraph]
    array: Callable[[Tensor, DType], StageArray]

    def work(self, weight: StageArray) -> ExchangeWork:
        """Return the graphs that devices run to exchange a parameter."""
        form = _form(self.kind, weight.rows * weight.columns)
        match form:
            case Chunks():
                difference, added = sparse_difference_graph(form), sparse_added_graph(form)
            case DType():
                difference, added = difference_graph(), added_graph()
            case block:
                difference, added = coded_difference_graph(block), coded_added_graph(block)
        out = returned(self.kind, weight.rows, weight.columns)
        graphs = self.graph(difference), self.graph(added)
        return ExchangeWork(graphs[0], out, graphs[1], keeps_error=isinstance(form, Chunks))

    def working_bytes(self, weight: StageArray) -> int:
        """Return the memory in which a device exchanges a parameter, besides what it holds."""
        elements, work = weight.rows * weight.columns, self.work(weight)
        back = [each.kept_bytes for each in work.returned]
        back += [weight.nbytes] if work.keeps_error else []
        given = dict.fromkeys(
            (names.START, names.WEIGHT, names.ERROR, names.GRADIENT, names.CODES), elements
        )
        match _form(self.kind, elements):
            case Chunks() as chunks:
                given |= {names.MASK: chunks.rows * chunks.columns // 8, names.SCALES: chunks.rows}
            case int() as block:
                given[names.SCALES] = elements // block
        return max(
            peak_bytes(work.difference, given) + sum(back),
            peak_bytes(work.added, given) + weight.nbytes,
        )

    def difference(self, work: ExchangeWork, elements: int, found: Found) -> Array:
        """Return a parameter's difference as an fp32 vector, given what a device returned."""
        arrays = {each.name: _joined(each, found[each.name]) for each in work.returned}
        match _form(self.kind, elements):
            case Chunks() as chunks:
                return sparse_difference(arrays[names.CODES], arrays[names.SCALES], chunks)
            case DType():
                return arrays[names.GRADIENT]
            case _:
                return dequantized(codes_of(arrays[names.CODES]), arrays[names.SCALES])

    def update(self, change: Tensor) -> tuple[Tensor, Mapping[str, StageArray]]:
        """Return the change of a parameter after rounding, and the arrays to send."""
        values = change.numpy().reshape(-1)
        match _form(self.kind, change.numel()):
            case Chunks() as chunks:
                mask, codes, scales = sparse_change(values, chunks)
                made = changed(mask, codes, scales, chunks)
                sent = {names.MASK: _bytes(mask)}
            case DType() as dtype:
                seen = change if dtype is DType.FP32 else change.bfloat16().float()
                return seen, {names.GRADIENT: self.array(seen, dtype)}
            case block:
                codes, scales = quantized(values, block)
                made, sent = dequantized(codes_from(codes), scales), {}
        sent[names.CODES] = _bytes(codes)
        sent[names.SCALES] = self.array(torch.from_numpy(scales), DType.FP32)
        return torch.from_numpy(made).reshape(change.shape), sent


def _bytes(values: Array) -> StageArray:
    """Return whole numbers below 256 as an array in the wire format."""
    payload = memoryview(values.tobytes())
    return StageArray(1, values.size, "uint8", payload, TrafficKind.WEIGHTS)


def peak_bytes(graph: StageGraph, given: Mapping[str, int]) -> int:
    """Return the working memory of a graph. `given` has the number of elements of its inputs."""
    inputs = [GivenInput(given[name]) for name in graph.inputs]
    return GraphMemory(graph.model).peak_bytes(inputs, [True] * len(graph.outputs))


def work_bytes(work: ExchangeWork) -> int:
    """Return the memory of a difference that a device has computed and is sending."""
    sent = (each.rows * each.columns * DType(each.dtype).itemsize for each in work.returned)
    return sum(each.kept_bytes for each in work.returned) + sum(sent)


def _joined(of: Returned, payloads: Sequence[Any]) -> Array:
    """Return the elements of a returned array, fp32, given its rows in order."""
    dtype = DType(of.dtype)
    each = of.columns * dtype.itemsize
    parts = [unpack(p, len(p) // each, of.columns, dtype).float32() for p in payloads]
    found: Array = np.concatenate(parts).reshape(-1)
    return found
