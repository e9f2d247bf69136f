"""Gradients of several servers are added up in one order, and freed where nobody needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cleave.training.servers import gradient_sums
from cleave.training.servers.gradient_sums import GradientSums
from cleave.training.servers.ranks import Alone, Exchange


class First(Alone):
    """The first of two servers; the other one has ones for every gradient, or none at all."""

    count = 2

    def __init__(self, other: str) -> None:
        self.sent: list[tuple[int, int]] = []
        self._other = other

    def agree(self, value: Any) -> list[Any]:
        return [value, self._other]

    def sum_at(self, owner: int, tensor: Tensor) -> Exchange:
        self.sent.append((owner, len(tensor)))
        tensor += torch.ones_like(tensor) if "1" in self._other else 0
        return super().sum_at(owner, tensor)


def parameters(sizes: Sequence[int]) -> dict[str, nn.Parameter]:
    return {f"p{n}": nn.Parameter(torch.zeros(size)) for n, size in enumerate(sizes)}


SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=12)


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_sums, "BUCKET_BYTES", 160)


@given(SIZES, st.data())
def test_all_servers_send_the_same_in_the_same_order(sizes: list[int], data: st.DataObject) -> None:
    owners = {f"p{n}": data.draw(st.integers(0, 1)) for n in range(len(sizes))}
    sent = []
    for _ in range(2):
        ranks, known = First("0" * len(sizes)), parameters(sizes)
        sums = GradientSums(ranks, known, owners)
        computed = data.draw(st.lists(st.sampled_from(sorted(known)), unique=True))
        for name in computed:
            known[name].grad = torch.full_like(known[name], 2.0)
            sums.complete(name)
        assert sorted(sums.finish()) == sorted(computed)
        sent.append(ranks.sent)
        for name, parameter in known.items():
            there = owners[name] == 0 and name in computed
            assert (parameter.grad is not None) == there
            if parameter.grad is not None:
                assert parameter.grad.shape == parameter.shape
                assert set(parameter.grad.tolist()) == {2.0}
    assert sent[0] == sent[1]
    assert sum(count for _, count in sent[0]) == sum(sizes)


def test_gradients_are_freed_while_the_pass_runs() -> None:
    known = parameters([40, 10, 40, 40])
    sums = GradientSums(First("1111"), known, {"p0": 0, "p1": 1, "p2": 1, "p3": 0})
    for name in ("p3", "p2", "p1"):
        known[name].grad = torch.ones_like(known[name])
        sums.complete(name)
    assert known["p2"].grad is None  # another server's
    assert known["p3"].grad is not None
    assert set(known["p3"].grad.tolist()) == {2.0}
    assert sums.finish() == ["p0", "p1", "p2", "p3"]
    assert known["p1"].grad is None
    assert known["p0"].grad is not None  # it came from the other server alone
    assert set(known["p0"].grad.tolist()) == {1.0}
