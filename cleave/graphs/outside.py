"""A model's computation outside its layers: before the first, and after the last."""

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
    """A batch before the first layer.

    Attributes:
        x: the first layer's input, shape (batch, tokens, width), with its autograd graph.
        beside: each layer's other tensor arguments by name (see `LayerCall.beside`).
    """

    x: Tensor
    beside: Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class OutsideLayers:
    """A causal language model without its layers.

    Attributes:
        calls: how the model calls its layers.
    """

    model: nn.Module
    calls: Sequence[LayerCall]

    def embed(
        self, ids: Tensor, mask: Tensor | None = None, positions: Tensor | None = None
    ) -> Embedded:
        """Run the model up to its first layer. `called_with` describes the arguments."""
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
            parameters: replacements of the model's parameters, by name.
            x: output of the last layer, shape (tokens, 1, width).
        """

        def give(call: LayerCall, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
            return (x,) if call.in_tuple else x

        ids = torch.zeros(x.shape[:2], dtype=torch.long)  # the logits do not depend on them
        how = {
            "input_ids": ids,
            "position_ids": ids,
            # A ready-made mask: making one depends on values, which cannot be traced.
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
        """Replace all layers by one function of the first layer's input within the context.

        Args:
            forward: returns the last layer's output; it may call layers.

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
        """Replace every layer's `forward` by a function within the context."""
        for call in self.calls:
            vars(call.layer)["forward"] = partial(forward, call)
        try:
            yield
        finally:
            for call in self.calls:
                del vars(call.layer)["forward"]

    @contextmanager
    def _layers_put_back(self) -> Iterator[None]:
        """Undo `_layers_replaced` within the context."""
        replaced = [vars(call.layer).pop("forward") for call in self.calls]
        try:
            yield
        finally:
            for call, forward in zip(self.calls, replaced, strict=True):
                vars(call.layer)["forward"] = forward


class _AllCalledError(Exception):
    """The last layer was called; the rest of the model must not run."""
