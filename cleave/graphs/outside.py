"""Runs a model's computation before its first layer and after its last layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cleave.graphs.attention import plain_attention
from cleave.graphs.calls import LayerCall
from cleave.graphs.errors import LayerGraphError
from cleave.graphs.packed import called_with


@dataclass(frozen=True)
class Embedded:
    """The arguments of a model's layers for one batch.

    Attributes:
        x: input of the first layer, shape (batch, tokens, width). Its autograd graph leads to the
            embedding.
        beside: for each layer, the other tensor arguments by name (see `LayerCall.beside`).
    """

    x: Tensor
    beside: Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class OutsideLayers:
    """Runs a causal language model without its layers.

    Attributes:
        model: the causal language model.
        calls: the recorded calls of the model's layers, in order.
    """

    model: nn.Module
    calls: Sequence[LayerCall]

    def embed(
        self, ids: Tensor, mask: Tensor | None = None, positions: Tensor | None = None
    ) -> Embedded:
        """Compute the input of the first layer and the other tensor arguments of all layers.

        Args:
            ids, mask, positions: the batch (see `called_with`).

        Raises:
            LayerGraphError: when the model does not call all layers as recorded, or a layer's other
                tensor arguments require a gradient.
        """
        given: list[tuple[Tensor, dict[str, Tensor]]] = []

        def take(call: LayerCall, x: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
            beside = call.tensors_in(args, kwargs)
            if trained := [name for name, tensor in beside.items() if tensor.requires_grad]:
                raise LayerGraphError(f"its layers get {', '.join(trained)}, which is trained")
            given.append((x, beside))
            if len(given) == len(self.calls):
                raise _AllCalledError
            return (x,) if call.in_tuple else x

        try:
            packed = positions is not None
            with plain_attention(self.model, packed=packed), self._layers_replaced(take):
                self.model(**called_with(ids, mask, positions))
        except _AllCalledError:
            return Embedded(given[0][0], [beside for _, beside in given])
        raise LayerGraphError("the model did not call all of its layers")

    def logits(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the logits of single tokens, shape (tokens, 1, vocabulary).

        Args:
            parameters: parameters and buffers to use instead of the model's own, by name.
            x: output of the last layer, shape (tokens, 1, width).

        Raises:
            LayerGraphError: when the model returns no logits.
        """

        def give(call: LayerCall, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
            return (x,) if call.in_tuple else x

        ids = torch.zeros(x.shape[:2], dtype=torch.long)  # the logits do not depend on the IDs
        how = {
            "input_ids": ids,
            "position_ids": ids,
            # Pass a complete mask. The model's own code for creating masks depends on tensor
            # values, so it cannot be traced.
            "attention_mask": torch.ones(x.shape[0], 1, 1, 1, dtype=torch.bool),
            "use_cache": False,
        }
        with plain_attention(self.model), self._layers_replaced(give):
            found: Any = torch.func.functional_call(self.model, dict(parameters), (), how)
        logits: object = found.logits
        if not isinstance(logits, Tensor):
            raise LayerGraphError(f"{type(self.model).__name__} returns no logits")
        return logits

    @contextmanager
    def layers_as_one(self, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Return a context manager in which one function replaces all layers of the model.

        Args:
            forward: maps the first layer's input to the last layer's output. It may call the
                original layers.

        Raises:
            LayerGraphError: when the model does not call each layer once, in order.
        """
        first = self.calls[0]
        called: list[nn.Module] = []

        def run(call: LayerCall, x: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
            called.append(call.layer)
            if call is first:
                with self._layers_put_back():
                    x = forward(x)
            return (x,) if call.in_tuple else x

        with self._layers_replaced(run):
            yield
        if called != [call.layer for call in self.calls]:
            raise LayerGraphError("the model left out a layer, or called one again")

    @contextmanager
    def _layers_replaced(self, forward: Callable[..., object]) -> Iterator[None]:
        """Replace the `forward` of every layer within the context.

        Args:
            forward: receives the layer's recorded call, then the arguments of the new call.
        """
        for call in self.calls:
            vars(call.layer)["forward"] = partial(forward, call)
        try:
            yield
        finally:
            for call in self.calls:
                del vars(call.layer)["forward"]

    @contextmanager
    def _layers_put_back(self) -> Iterator[None]:
        """Restore the original `forward` of every layer within the context."""
        replaced = [vars(call.layer).pop("forward") for call in self.calls]
        try:
            yield
        finally:
            for call, forward in zip(self.calls, replaced, strict=True):
                vars(call.layer)["forward"] = forward


class _AllCalledError(Exception):
    """Raised when the last layer is called, to skip the rest of the model."""
