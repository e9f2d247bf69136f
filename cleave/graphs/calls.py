"""Record the calls of a model's decoder layers and run the model without its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cleave.attention_blocks import BLOCKS, Blocks
from cleave.errors import LayerGraphError
from cleave.graphs.attention import plain_attention
from cleave.graphs.packed import called_with


@dataclass(frozen=True)
class LayerCall:
    """A recorded call of one decoder layer.

    Attributes:
        x, y: the layer's input and output, shape (batch, tokens, width).
        extras: the other tensor arguments by name (masks, position embeddings).
        in_tuple: whether the layer returns a tuple whose first element is the output.
        hooked: why hooks within the layer prevent its export; an empty string if none do.
    """

    model: nn.Module
    layer: nn.Module
    x: Tensor
    extras: Mapping[str, Tensor]
    y: Tensor
    in_tuple: bool
    blocks: Blocks
    hooked: str
    _leaves: Sequence[object]  # all arguments except `x`; the name of a tensor replaces the tensor
    _structure: pytree.TreeSpec

    def run(
        self, parameters: Mapping[str, Tensor], x: Tensor, extras: Mapping[str, Tensor]
    ) -> Tensor:
        """Repeat the recorded call with other tensors and return the layer's output."""
        leaves = [extras[n] if isinstance(n, _Name) else n for n in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        with plain_attention(self.model, self.blocks):
            found = torch.func.functional_call(self.layer, dict(parameters), (x, *args), kwargs)
        return output_of(found)

    def tensors_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the tensor arguments of a later call by name. `args` excludes the input `x`.

        Raises:
            LayerGraphError: if argument names or non-tensor values differ from the recorded call.
        """
        tensors, leaves, structure = _flattened(args, kwargs)
        if structure != self._structure or leaves != list(self._leaves):
            raise LayerGraphError("the model calls its layers differently than before")
        return tensors


class _Name(str):
    """Name of a tensor argument. The class distinguishes a name from an argument of type `str`."""

    __slots__ = ()


def decoder_layers(model: nn.Module) -> Sequence[nn.Module]:
    """Return a model's decoder layers: the `ModuleList` with the most parameters.

    Raises:
        LayerGraphError: if the model has no `ModuleList`.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise LayerGraphError(f"{type(model).__name__} has no list of layers")
    largest: nn.ModuleList = max(lists, key=lambda each: sum(p.numel() for p in each.parameters()))
    return tuple(largest)


def layer_calls(
    model: nn.Module,
    ids: Tensor,
    mask: Tensor | None = None,
    blocks: Blocks = BLOCKS,
    *,
    positions: Tensor | None = None,
) -> list[LayerCall]:
    """Run a forward pass with `plain_attention` and return the recorded call of each layer.

    Args:
        model: transformers causal language model.
        ids, mask, positions: token IDs, mask and token positions (see `called_with`).

    Raises:
        LayerGraphError: if the model does not call each layer once, in order, with the output of
            the previous layer; or if a layer has hooks or an argument of an unsupported type.
    """
    layers = decoder_layers(model)
    if len(set(layers)) < len(layers):
        raise LayerGraphError("the model does not call each layer exactly once, in order")
    calls: list[LayerCall] = []

    def note(
        layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], found: object
    ) -> None:
        if not args or not isinstance(args[0], Tensor):
            raise LayerGraphError("the model calls its layers without a tensor as first argument")
        hooked = _hooked(layer)
        extras, leaves, structure = _flattened(args[1:], kwargs)
        for leaf in leaves:
            if not isinstance(leaf, _PLAIN):
                raise LayerGraphError(f"it is called with a {type(leaf).__name__}")
        in_tuple, y = isinstance(found, tuple), output_of(found)
        calls.append(
            LayerCall(model, layer, args[0], extras, y, in_tuple, blocks, hooked, leaves, structure)
        )

    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        with plain_attention(model, blocks, packed=positions is not None), torch.no_grad():
            model(**called_with(ids, mask, positions))
    finally:
        for hook in hooks:
            hook.remove()
    if [call.layer for call in calls] != list(layers):
        raise LayerGraphError("the model does not call each layer exactly once, in order")
    for before, after in pairwise(calls):
        if before.y.data_ptr() != after.x.data_ptr() or before.y.shape != after.x.shape:
            raise LayerGraphError("the model changes the hidden state between layers")
    return calls


_PLAIN = bool | int | float | str | torch.dtype | None


def _flattened(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Tensor], list[object], pytree.TreeSpec]:
    """Return a call's tensors by name, the flattened arguments, and the arguments' structure.

    In the flattened arguments, names replace tensors. `args` excludes the layer's input.
    """
    paths, structure = pytree.tree_flatten_with_path((args, kwargs))
    tensors: dict[str, Tensor] = {}
    leaves: list[object] = []
    for path, leaf in paths:
        if isinstance(leaf, Tensor):
            keys = (str(getattr(key, "key", getattr(key, "idx", ""))) for key in path[1:])
            name = _Name(".".join(keys))
            tensors[name], leaf = leaf, name
        leaves.append(leaf)
    return tensors, leaves, structure


def _hooked(layer: nn.Module) -> str:
    """Return a message if a submodule has hooks, because graphs ignore hooks; otherwise "".

    Raise LayerGraphError if the layer itself has hooks.
    """
    for name, module in layer.named_modules():
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        hooks += len(module._backward_hooks) + len(module._backward_pre_hooks)
        if module is layer and hooks > 1:  # `layer_calls` itself adds one hook
            raise LayerGraphError(f"its layer {type(layer).__name__} has hooks")
        if module is not layer and hooks:
            return f"its module {name} has hooks"
    return ""


def output_of(found: object) -> Tensor:
    """Return a layer's output tensor: `found`, or its first element if `found` is a tuple.

    Raises:
        LayerGraphError: if the output is not a tensor.
    """
    first = found[0] if isinstance(found, tuple) else found
    if not isinstance(first, Tensor):
        raise LayerGraphError(f"it returns a {type(first).__name__} instead of a tensor")
    return first


@dataclass(frozen=True)
class Embedded:
    """The arguments of a model's layers for one batch.

    Attributes:
        x: input of the first layer. If `embed` returned `x`, autograd propagates the gradient of
            `x` to the embedding.
        extras: for each layer, the other tensor arguments by name (see `LayerCall.extras`).
    """

    x: Tensor
    extras: Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class OutsideLayers:
    """Runs a causal language model without its layers. `calls` are the layers' recorded calls."""

    model: nn.Module
    calls: Sequence[LayerCall]

    def embed(
        self, ids: Tensor, mask: Tensor | None = None, positions: Tensor | None = None
    ) -> Embedded:
        """Return the arguments that the model passes to its layers (see `called_with`).

        Raises:
            LayerGraphError: if the model does not call all layers as recorded, or if a tensor
                argument of a layer, other than its input, requires a gradient.
        """
        given: list[tuple[Tensor, dict[str, Tensor]]] = []

        def take(call: LayerCall, x: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
            extras = call.tensors_in(args, kwargs)
            if trained := [name for name, tensor in extras.items() if tensor.requires_grad]:
                raise LayerGraphError(f"its layers get {', '.join(trained)}, which is trained")
            given.append((x, extras))
            if len(given) == len(self.calls):
                raise _AllCalledError
            return (x,) if call.in_tuple else x

        try:
            packed = positions is not None
            with plain_attention(self.model, packed=packed), self._layers_replaced(take):
                self.model(**called_with(ids, mask, positions))
        except _AllCalledError:
            return Embedded(given[0][0], [extras for _, extras in given])
        raise LayerGraphError("the model did not call all of its layers")

    def logits(self, parameters: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the logits for one-token sequences, shape (tokens, 1, vocabulary).

        Args:
            parameters: parameters and buffers to use instead of the model's own, by name.
            x: output of the last layer, shape (tokens, 1, width).

        Raises:
            LayerGraphError: if the model returns no logits.
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

    def first_input(self, parameters: Mapping[str, Tensor], ids: Tensor) -> Tensor:
        """Return the input of the first layer, shape (batch, tokens, width), for whole sequences.

        Args:
            parameters: parameters and buffers to use instead of the model's own, by name.
            ids: token IDs, shape (batch, tokens).
        """
        found: list[Tensor] = []

        def take(call: LayerCall, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            found.append(x)
            raise _AllCalledError

        how = {
            "input_ids": ids,
            "position_ids": torch.arange(ids.shape[1])[None],
            "attention_mask": torch.ones(ids.shape[0], 1, 1, 1, dtype=torch.bool),  # as in `logits`
            "use_cache": False,
        }
        with (
            plain_attention(self.model),
            self._layers_replaced(take),
            suppress(_AllCalledError),
        ):
            torch.func.functional_call(self.model, dict(parameters), (), how)
        return found[0]

    @contextmanager
    def layers_as_one(self, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Return a context manager in which one call of `forward` replaces all layers.

        `forward` may call the layers.

        Raises:
            LayerGraphError: if the model does not call each layer once, in order.
        """
        first = self.calls[0]
        called: list[nn.Module] = []

        def run(call: LayerCall, x: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
            called.append(call.layer)
            if call is first:
                replaced = [vars(each.layer).pop("forward") for each in self.calls]
                try:
                    x = forward(x)
                finally:
                    for each, one in zip(self.calls, replaced, strict=True):
                        vars(each.layer)["forward"] = one
            return (x,) if call.in_tuple else x

        with self._layers_replaced(run):
            yield
        if called != [call.layer for call in self.calls]:
            raise LayerGraphError("the model skipped a layer, or called one twice")

    @contextmanager
    def _layers_replaced(self, forward: Callable[..., object]) -> Iterator[None]:
        """Return a context manager in which each layer's `forward` is `partial(forward, call)`."""
        for call in self.calls:
            vars(call.layer)["forward"] = partial(forward, call)
        try:
            yield
        finally:
            for call in self.calls:
                del vars(call.layer)["forward"]


class _AllCalledError(Exception):
    """Raised when the last layer is called, to skip the rest of the model."""
