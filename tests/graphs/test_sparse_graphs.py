"""The graphs of sparse exchanges compute what the published algorithm computes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from cleave import graph_names as names
from cleave.arrays import Array
from cleave.graphs.sparse_graphs import (
    Chunks,
    changed,
    sparse_added_graph,
    sparse_change,
    sparse_difference,
    sparse_difference_graph,
)
from cleave.machine.graph_choice import open_in_torch, open_on_cpu
from cleave.machine.graph_session import OpenGraph

Opens = Callable[[bytes], OpenGraph]
OPENS: list[Opens] = [open_on_cpu, lambda model: open_in_torch("cpu", model)]
SIZES = [1, 7, 64, 501, 4096, 3 * 4096, 12_289]


def two_bits(values: Tensor) -> Tensor:
    """The values of a chunk in 2 bits: a sign, and one of two magnitudes."""
    sizes = values.abs()
    large = sizes > sizes.mean()
    found = torch.zeros_like(values)
    for part in (large, ~large):
        if part.any():
            found[part] = sizes[part].mean()
    return found * torch.where(values < 0, -1.0, 1.0)


def published(error: Tensor, difference: Tensor) -> tuple[Tensor, Tensor]:
    """What a device returns and its new error (arXiv 2508.15706, algorithm 1), with torch alone."""
    whole = 0.95 * error + difference
    chunks = Chunks.of(whole.numel())
    returned = torch.zeros_like(whole)
    for first in range(0, whole.numel(), chunks.columns):
        chunk = whole[first : first + chunks.columns]
        kept = min(chunks.kept, chunk.numel())
        places = chunk.abs().topk(kept).indices
        returned[first + places] = two_bits(chunk[places])
    return returned, whole - returned


@pytest.mark.parametrize("opens", OPENS)
@pytest.mark.parametrize("size", SIZES)
def test_a_device_returns_what_the_published_algorithm_does(opens: Opens, size: int) -> None:
    rng, chunks = np.random.default_rng(size), Chunks.of(size)
    graph = opens(sparse_difference_graph(chunks))
    error = np.zeros(size, np.float32)
    for _ in range(3):
        start, weight = (rng.standard_normal(size, np.float32) for _ in range(2))
        made = graph.run({names.START: start, names.WEIGHT: weight, names.ERROR: error})
        wanted = published(torch.from_numpy(error), torch.from_numpy(start - weight))
        halves = made[names.CODES].astype(np.float16)
        assert np.isfinite(halves).all()
        found = sparse_difference(halves, made[names.SCALES], chunks)
        error = made[names.updated(names.ERROR)]
        np.testing.assert_allclose(found, wanted[0], rtol=1e-5)
        np.testing.assert_allclose(error, wanted[1], rtol=1e-6, atol=1e-5)
        assert len(halves) == chunks.rows * chunks.kept


def test_one_of_64_elements_is_returned_and_little_is_padded() -> None:
    for size in (10**4, 10**5 + 3, 38_597_376):
        chunks = Chunks.of(size)
        assert chunks.columns <= 4096
        assert chunks.padding <= chunks.rows * 8
        assert chunks.rows * chunks.kept <= 1.02 * size / 64 + chunks.rows


@pytest.mark.parametrize("opens", OPENS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
def test_a_change_arrives(opens: Opens, size: int, density: float) -> None:
    rng, chunks = np.random.default_rng(size), Chunks.of(size)
    change = rng.standard_normal(size, np.float32) * (rng.random(size) < density)
    change = change.astype(np.float32)
    mask, codes, scales = sparse_change(change, chunks)
    seen = changed(mask, codes, scales, chunks)
    np.testing.assert_allclose(seen, change, atol=np.abs(change).max() / 240)
    start = rng.standard_normal(size, np.float32)
    given = {names.START: start, names.MASK: mask, names.CODES: codes, names.SCALES: scales}
    made = opens(sparse_added_graph(chunks)).run(given)
    np.testing.assert_array_equal(made[names.updated(names.WEIGHT)], start + seen)
    assert mask.nbytes + codes.nbytes <= size / 8 + (change != 0).sum() + 9 * chunks.rows


@pytest.mark.parametrize("bits", [0x0000, 0x0001, 0x7C00, 0xFFFF, 0x7BFF])
def test_places_beyond_a_chunk_are_no_numbers(bits: int) -> None:
    chunks = Chunks.of(512)
    halves = np.full(chunks.kept, bits, np.uint16).view(np.float16)
    found: Array = sparse_difference(halves, np.ones(2, np.float32), chunks)
    assert np.isnan(found).all()
