"""Passes on the PS through layers without graphs. Devices may still compute these layers' GEMMs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from cleave.graphs.model_graphs import ModelGraphs


class PsPasses:
    """Runs forward and backward passes on the PS through the layers that have no graph.

    Consecutive layers without graphs form a *run*. The key of a run is the number of layers (or
    parts of layers) with graphs before it.

    Attributes:
        runs: indices of each run's layers in the model, by the run's key.
    """

    def __init__(
        self, graphs: ModelGraphs, autocast: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self.runs = runs_of(graphs)
        self._gradients: dict[int, Tensor] = {}
        self._calls = graphs.calls
        self._autocast = autocast
        self._under_way: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def forward(
        self, run: int, batch: int, x: Tensor, extras: Sequence[Mapping[str, Tensor]]
    ) -> Tensor:
        """Return the output of a run in fp32 and retain its autograd graph for `backward`.

        Args:
            run: key of the run. If there is no such run, `x` is returned unchanged.
            batch: index of the micro-batch.
            x: input of the run's first layer.
            extras: for each layer of the model, the tensor arguments other than `x`, by name.
        """
        if run not in self.runs:
            return x
        given = x.detach().to(self._calls[self.runs[run][0]].x.dtype).requires_grad_()
        with torch.enable_grad(), self._autocast():
            y = given
            for number in self.runs[run]:
                y = self._calls[number].run({}, y, extras[number])
        self._under_way[run, batch] = given, y
        return y.detach().float()

    def backward(self, run: int, batch: int, dy: Tensor) -> Tensor:
        """Return the gradient of a run's input, and accumulate its parameters' gradients.

        `dy` is the gradient of the run's output. If there is no such run, `dy` is returned.
        """
        if run not in self.runs:
            return dy
        given, y = self._under_way.pop((run, batch))
        trained = self.trained(run)
        dx, *found = torch.autograd.grad(y, [given, *trained], dy.to(y.dtype), allow_unused=True)
        for parameter, gradient in zip(trained, found, strict=True):
            if gradient is not None:
                self._add(self._gradients, id(parameter), gradient)
        return dx

    def add_gradients(self, found: dict[int, Tensor]) -> dict[int, Tensor]:
        """Add the accumulated gradients to `found`, by parameter `id`, and return `found`."""
        for key, gradient in self._gradients.items():
            self._add(found, key, gradient)
        return found

    def forget(self) -> None:
        """Discard accumulated gradients, and forward passes whose backward pass has not run."""
        self._gradients.clear()
        self._under_way.clear()

    @staticmethod
    def _add(found: dict[int, Tensor], key: int, gradient: Tensor) -> None:
        found[key] = found[key] + gradient if key in found else gradient

    def trained(self, run: int) -> list[nn.Parameter]:
        """Return a run's trained parameters without duplicates; empty for an unknown run."""
        layers = (self._calls[number].layer for number in self.runs.get(run, ()))
        trained = (p for layer in layers for p in layer.parameters() if p.requires_grad)
        return list(dict.fromkeys(trained))


def runs_of(graphs: ModelGraphs) -> dict[int, list[int]]:
    """Return the indices of the layers in each run, by the run's key; see `PsPasses`."""
    runs: dict[int, list[int]] = {}
    for number in sorted(graphs.refused):
        before = sum(part.layer < number for part in graphs.parts)
        runs.setdefault(before, []).append(number)
    return runs


def described_refusals(graphs: ModelGraphs) -> str:
    """Return a message that lists the layers run on the PS; empty if every layer has a graph."""
    by_reason: dict[str, list[int]] = {}
    for number, reason in sorted(graphs.refused.items()):
        by_reason.setdefault(reason, []).append(number + 1)
    if not by_reason:
        return ""
    which = "; ".join(
        f"{_listed(numbers)} of {len(graphs.calls)}: {reason}"
        for reason, numbers in by_reason.items()
    )
    return f"the parameter server runs some layers itself; stages number only the others: {which}"


def _listed(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    return f"layers {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
