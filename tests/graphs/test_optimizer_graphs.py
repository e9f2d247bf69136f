"""The graphs of optimizer steps compute what PyTorch's optimizers compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

from cleave import graph_names as names
from cleave.arrays import Array
from cleave.graphs.optimizer_graphs import (
    adamw_graph,
    adamw_scalars,
    sgd_graph,
    sgd_scalars,
    squares_graph,
)
from cleave.machine.graph_choice import open_in_torch, open_on_cpu
from cleave.machine.graph_session import OpenGraph

SIZE, STEPS, RATE, DECAY = 501, 12, 1e-2, 0.1
BETAS = (0.9, 0.95)
EPS = 1e-8

Opens = Callable[[bytes], OpenGraph]
OPENS: list[Opens] = [open_on_cpu, lambda model: open_in_torch("cpu", model)]


def updates(
    model: bytes, scalars: Callable[[int, float], Array], opens: Opens, moments: int
) -> Array:
    """Return a weight after `STEPS` steps of a graph."""
    rng, graph = np.random.default_rng(1), opens(model)
    state: Mapping[str, Array] = {
        names.WEIGHT: rng.standard_normal(SIZE, np.float32),
        **{names.moment(n): np.zeros(SIZE, np.float32) for n in range(moments)},
    }
    for step in range(1, STEPS + 1):
        gradient = rng.standard_normal(SIZE, np.float32)
        given = {names.GRADIENT: gradient, names.SCALARS: scalars(step, 1 / step)[0]}
        made = graph.run({**state, **given})
        state = {name: made[names.updated(name)] for name in state}
    return state[names.WEIGHT]


def in_torch(make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> Array:
    rng = np.random.default_rng(1)
    weight = torch.from_numpy(rng.standard_normal(SIZE, np.float32)).requires_grad_()
    optimizer = make([weight])
    for step in range(1, STEPS + 1):
        weight.grad = torch.from_numpy(rng.standard_normal(SIZE, np.float32)) / step
        optimizer.step()
    return weight.detach().numpy()


@pytest.mark.parametrize("opens", OPENS)
def test_adamw_is_that_of_pytorch(opens: Opens) -> None:
    found = updates(
        adamw_graph(),
        lambda step, clip: adamw_scalars(
            rate=RATE, decay=DECAY, betas=BETAS, eps=EPS, step=step, clip=clip
        ),
        opens,
        2,
    )
    wanted = in_torch(
        lambda them: torch.optim.AdamW(them, lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY)
    )
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("opens", OPENS)
def test_sgd_is_that_of_pytorch(opens: Opens, momentum: float) -> None:
    found = updates(
        sgd_graph(momentum=bool(momentum)),
        lambda _, clip: sgd_scalars(rate=RATE, decay=DECAY, momentum=momentum, clip=clip),
        opens,
        int(bool(momentum)),
    )
    wanted = in_torch(
        lambda them: torch.optim.SGD(them, lr=RATE, momentum=momentum, weight_decay=DECAY)
    )
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("opens", OPENS)
def test_squares_are_added_up(opens: Opens) -> None:
    gradient = np.random.default_rng(1).standard_normal(SIZE, np.float32)
    total, graph = np.array([2.0], np.float32), opens(squares_graph())
    found = graph.run({names.GRADIENT: gradient, names.total(names.SQUARES): total})
    assert found[names.new_total(names.SQUARES)][0] == pytest.approx(2 + (gradient**2).sum())
