"""The loss and its gradients on an accelerator of the PS, by the graph that devices run, too."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from cleave import graph_names as names
from cleave.arrays import Array, DType
from cleave.graphs.packed import vocabulary_of
from cleave.machine.graph_choice import MakeGraph
from cleave.machine.graph_run import on_host
from cleave.machine.graph_session import GraphError, OpenGraph, first_line
from cleave.training.stages.stage_work import ModelWork

_MOST_LOGITS_BYTES: Final = 2**28  # a graph holds a few arrays of this size at once


class SumsLostError(GraphError):
    """The gradients that `PsLoss` has summed cannot be read from the accelerator."""


class PsLoss:
    """Computes the losses of a step's micro-batches, and their gradients.

    Parameters and gradient sums stay on the accelerator during a step.

    Args:
        work: the model, which has a graph of the loss.
        open_graph: opens the graph.

    Raises:
        GraphError: if the graph cannot be opened, or a run fails. A failed run changes no sums.
        SumsLostError: from `take`, if the gradients cannot be read.

    Example:
        >>> loss = PsLoss(work, open_graph)
        >>> value, dy = loss(y, targets, scale)
        >>> gradients = loss.take()
    """

    def __init__(self, work: ModelWork, open_graph: MakeGraph) -> None:
        assert work.graphs.loss is not None
        self._work, self._graph = work, work.graphs.loss
        products = work.dtype if work.dtype is DType.BF16 else None
        self._session: OpenGraph = open_graph(self._graph.graph, (), products)
        self._parameters: dict[str, Any] = {}  # of the current step
        self._sums: dict[str, Any] = {}

    def __call__(self, y: Tensor, targets: Tensor, scale: float) -> tuple[float, Tensor]:
        """Return a micro-batch's loss and the gradient of `y`; add the parameters' gradients.

        Args:
            y: output of the last layer in fp32, shape (batch, tokens, width).
            targets: target tokens, shape (batch, tokens); -100 for tokens without loss.
            scale: factor by which each token's loss is multiplied.
        """
        try:
            return self._run(y, targets, scale)
        except Exception as error:  # noqa: BLE001 - PyTorch's errors have no common base class
            raise GraphError(first_line(error)) from None

    def _run(self, y: Tensor, targets: Tensor, scale: float) -> tuple[float, Tensor]:
        held, upload = self._work.held_by_loss, self._session.upload
        if not self._parameters:
            self._parameters = {
                names.parameter(n): upload(_array(held[n])) for n in self._graph.parameters
            }
        self._parameters[names.SCALE] = upload(np.array(scale, np.float32))
        sums = dict(self._sums)
        for n in self._graph.trainable:
            if names.total(n) not in sums:
                sums[names.total(n)] = upload(np.zeros(held[n].shape, np.float32))
        rows = max(1, _MOST_LOGITS_BYTES // (4 * vocabulary_of(self._work.model)))
        loss, dy = 0.0, []
        for x, wanted in zip(
            torch.split(y.detach().reshape(-1, 1, y.shape[-1]), rows),
            torch.split(targets.reshape(-1), rows),
            strict=True,
        ):
            feed = {names.X: upload(_array(x)), names.TARGETS: upload(_array(wanted))}
            made = self._session.run_into(feed | self._parameters | sums, {})
            loss += float(on_host(made[names.LOSS])[0])
            dy.append(torch.from_numpy(np.array(on_host(made[names.DX]))))
            sums = {names.total(n): made[names.new_total(n)] for n in self._graph.trainable}
        self._sums = sums
        return loss, torch.cat(dy).reshape(y.shape)

    def take(self) -> dict[int, Tensor]:
        """Return the gradients by parameter `id`, and end the step."""
        held, found = self._work.held_by_loss, {}
        try:
            for n in self._graph.trainable:
                if names.total(n) in self._sums:
                    total = np.array(on_host(self._sums[names.total(n)]))
                    found[id(held[n])] = torch.from_numpy(total)
        except Exception as error:  # noqa: BLE001 - PyTorch's errors have no common base class
            reason = first_line(error)
            raise SumsLostError(f"the gradients of the loss are lost: {reason}") from None
        self.forget()
        return found

    def forget(self) -> None:
        """Discard the step's gradients and parameters."""
        self._parameters, self._sums = {}, {}


def _array(tensor: Tensor) -> Array:
    wide = tensor.float() if tensor.is_floating_point() else tensor  # a frozen head may be in bf16
    found: Array = wide.detach().numpy()
    return found
