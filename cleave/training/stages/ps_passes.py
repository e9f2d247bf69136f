"""Layers of a step by stages that devices cannot do: the parameter server does their passes.

Their linear layers multiply as everywhere: on devices by tiles, where the model is offloaded so and
that is sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from cleave.graphs.model_graphs import ModelGraphs


class PsPasses:
    """Does the passes of the layers that have no graphs, in runs of consecutive ones.

    A run is named by the number of the device layer that follows it; the last one by the number of
    device layers.

    Args:
        graphs: of the model.
        autocast: makes the context in which the model computes here.

    Attributes:
        runs: the numbers of the model's layers in each run.
    """

    def __init__(
        self, graphs: ModelGraphs, autocast: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self.runs = runs_of(graphs)
        self._gradients: dict[int, Tensor] = {}
        self._calls = graphs.calls
        self._autocast = autocast
        self._under_way: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def trains(self, run: int) -> bool:
        """Say whether a run has parameters that are trained."""
        return bool(self.trained(run))

    def forward(
        self, run: int, batch: int, x: Tensor, beside: Sequence[Mapping[str, Tensor]]
    ) -> Tensor:
        """Return what a run makes of a micro-batch; that itself where there is no run.

        Args:
            run: which one.
            batch: the number of the micro-batch.
            x: the run's input.
            beside: by layer of the model, what that is called with beside its input.
        """
        if run not in self.runs:
            return x
        given = x.detach().requires_grad_()
        with torch.enable_grad(), self._autocast():
            y = given
            for number in self.runs[run]:
                y = self._calls[number].run({}, y, beside[number])
        self._under_way[run, batch] = given, y
        return y.detach().float()

    def backward(self, run: int, batch: int, dy: Tensor) -> Tensor:
        """Return the gradient of a run's input, and add up those of its parameters.

        Args:
            run, batch: of a forward pass.
            dy: the gradient of what that returned.
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
        """Add the gradients of all parameters since `forget` to those of others; return these.

        Args:
            found: by the `id` of their parameter.
        """
        for key, gradient in self._gradients.items():
            self._add(found, key, gradient)
        return found

    def forget(self) -> None:
        """Drop all gradients and whatever is under way."""
        self._gradients.clear()
        self._under_way.clear()

    @staticmethod
    def _add(found: dict[int, Tensor], key: int, gradient: Tensor) -> None:
        found[key] = found[key] + gradient if key in found else gradient

    def trained(self, run: int) -> Sequence[Tensor]:
        layers = (self._calls[number].layer for number in self.runs.get(run, ()))
        return trained_parameters(layers)


def trained_parameters(layers: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of layers that require gradients, each once where layers share it."""
    trained = (p for layer in layers for p in layer.parameters() if p.requires_grad)
    return list(dict.fromkeys(trained))


def runs_of(graphs: ModelGraphs) -> dict[int, list[int]]:
    """Return the layers without graphs as runs; see `PsPasses`."""
    runs: dict[int, list[int]] = {}
    for number in sorted(graphs.refused):
        before = sum(part.layer < number for part in graphs.parts)
        runs.setdefault(before, []).append(number)
    return runs


def described_refusals(graphs: ModelGraphs) -> str:
    """Say in a sentence without its full stop which layers stay here, and why; empty for none."""
    by_reason: dict[str, list[int]] = {}
    for number, reason in sorted(graphs.refused.items()):
        by_reason.setdefault(reason, []).append(number + 1)
    each = [
        f"{_listed(numbers)} of {len(graphs.calls)}: {reason}"
        for reason, numbers in by_reason.items()
    ]
    if not each:
        return ""
    which = "; ".join(each)
    return f"the parameter server does some layers itself, and stages count the others: {which}"


def _listed(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"layer {numbers[0]}"
    return f"layers {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
