"""Passes of layers that devices cannot compute by stages; the PS computes them.

Products in these layers may still go to devices by tiles, if the model is offloaded that way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from cleave.graphs.model_graphs import ModelGraphs


class PsPasses:
    """Computes the passes of layers without graphs, in runs of consecutive layers.

    The key of a run is the number of the device layer that follows it. The key of a run after the
    last device layer is the number of device layers.

    Args:
        graphs: graphs of the model.
        autocast: makes the context manager for local passes.

    Attributes:
        runs: numbers of the model's layers in each run, by key.
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
        """Return whether a run has trained parameters."""
        return bool(self.trained(run))

    def forward(
        self, run: int, batch: int, x: Tensor, beside: Sequence[Mapping[str, Tensor]]
    ) -> Tensor:
        """Return a run's output, in fp32; `x` itself if the run does not exist.

        Args:
            run: key of the run.
            batch: number of the micro-batch.
            x: input of the run.
            beside: other tensor arguments (masks, position embeddings) of each layer of the model.
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
        """Return the gradient of a run's input; accumulate those of its parameters.

        Args:
            run, batch: run and micro-batch of a forward pass.
            dy: gradient of the run's output.
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
        """Add the gradients accumulated since `forget` to `found`, and return `found`.

        Args:
            found: gradients by the `id` of their parameter.
        """
        for key, gradient in self._gradients.items():
            self._add(found, key, gradient)
        return found

    def forget(self) -> None:
        """Discard all gradients and unfinished passes."""
        self._gradients.clear()
        self._under_way.clear()

    @staticmethod
    def _add(found: dict[int, Tensor], key: int, gradient: Tensor) -> None:
        found[key] = found[key] + gradient if key in found else gradient

    def trained(self, run: int) -> Sequence[Tensor]:
        layers = (self._calls[number].layer for number in self.runs.get(run, ()))
        return trained_parameters(layers)


def trained_parameters(layers: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the trained parameters of layers, without duplicates."""
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
    """Return a sentence about the layers that the PS computes and why; empty if there are none."""
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
