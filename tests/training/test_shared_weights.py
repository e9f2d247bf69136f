"""Each server keeps the weights that it owns; the others gather a layer's for its passes."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cleave.training.servers.shared_weights import (
    OUTSIDE,
    Kind,
    exchanges,
    weight_owners,
)
from cleave.training.tiles.offload import offload
from emulator.virtual import emulated
from profiles.fleets import paper_fleet

# --- what is exchanged ---


@given(st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_every_layer_is_gathered_for_each_pass_and_freed_again(
    passes: int, layers: int, backward: bool
) -> None:
    whole: set[int] = set()
    seen: list[tuple[int, Kind, int]] = []
    for each in exchanges(passes, layers, backward=backward):
        if each.kind is Kind.FORWARD and backward and each.unit != OUTSIDE:
            whole = {OUTSIDE}  # layers are freed after their forward pass, but for the last one
        if each.kind is Kind.BACKWARD:
            assert whole == ({OUTSIDE, layers} if each.unit == layers else {OUTSIDE})
        if each.kind is Kind.DONE and each.unit != OUTSIDE:
            assert each.unit in whole
            whole.discard(each.unit)
        elif each.kind is not Kind.DONE:
            whole.add(each.unit)
        seen.append((each.number, each.kind, each.unit))
    assert len(set(seen)) == len(seen)
    for number in range(passes):
        for layer in range(1, layers + 1):
            assert (number, Kind.FORWARD, layer) in seen
            assert (number, Kind.DONE, layer) in seen
            assert ((number, Kind.BACKWARD, layer) in seen) is (backward and layer < layers)


# --- weights of another that lie at the same address ---


class Gathered:
    """Two layers whose weights come to lie in one piece of memory, one after the other."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)])
        self.values: list[Tensor] = [self.weight(n).detach().clone() for n in range(2)]
        fleet = emulated(paper_fleet(2))
        offload(self.layers, fleet)
        self.operands: Any = self.layers[0].__dict__["_cleave"]

    def weight(self, number: int) -> nn.Parameter:
        found = self.layers[number].weight
        assert isinstance(found, nn.Parameter)
        return found

    def gather(self, number: int, memory: Tensor) -> None:
        memory.copy_(self.values[number])
        self.weight(number).data = memory
        self.operands.bind(self.weight(number))

    def free(self, number: int) -> None:
        self.operands.unbind(self.weight(number), done=True)
        self.weight(number).data = torch.full((), torch.nan).expand(8, 8)


def test_a_weight_is_not_taken_for_another_that_had_its_address() -> None:
    case, memory, other = Gathered(), torch.empty(8, 8), torch.empty(8, 8)
    x = torch.randn(4, 8, requires_grad=True)
    products = []
    told = []
    for number in range(2):
        case.gather(number, memory)
        told.append((case.weight(number).data_ptr(), case.weight(number)._version))
        products.append(case.layers[number](x))
        case.free(number)
    assert told[0] == told[1]  # all that the address and autograd tell is the same
    for y, values in zip(products, case.values, strict=True):
        torch.testing.assert_close(y, x @ values.T)
    for number, where in ((1, other), (0, memory)):  # backward, each in other memory than before
        case.gather(number, where)
        (dx,) = torch.autograd.grad(products[number].sum(), x)
        torch.testing.assert_close(dx, torch.ones(4, 8) @ case.values[number])
        case.free(number)
    case.gather(0, memory)
    kept = case.layers[0](x)  # its graph lives on, and the weight gets new values
    case.free(0)
    case.values[0] = case.values[0] + 1
    case.operands.updated()
    case.gather(0, memory)
    torch.testing.assert_close(case.layers[0](x), x @ case.values[0].T)
    assert kept is not None


# --- who owns which weights ---


def test_the_largest_weights_are_spread_also_where_they_are_frozen() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    for layer in list(model)[:2]:
        layer.requires_grad_(False)
    owners = weight_owners(model, 2)
    assert sorted(owners[f"{n}.weight"] for n in (0, 1)) == [0, 1]
    assert sorted(owners[f"{n}.weight"] for n in (2, 3)) == [0, 1]
