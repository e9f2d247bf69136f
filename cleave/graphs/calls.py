"""Records the arguments with which a model calls its decoder layers in one forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cleave.attention_blocks import BLOCKS, Blocks
from cleave.graphs.attention import plain_attention
from cleave.graphs.errors import LayerGraphError
from cleave.graphs.packed import called_with


@dataclass(frozen=True)
class LayerCall:
    """A recorded call of one decoder layer.

    Attributes:
        model: the model that called the layer.
        layer: the decoder layer.
        x: the layer's input, shape (batch, tokens, width).
        beside: maps the name of each other tensor argument (masks, position embeddings) to the
            tensor.
        y: the layer's output, same shape as `x`.
        in_tuple: whether the layer returns a tuple whose first element is the output.
        blocks: decides when attention runs over blocks of queries, and the size of a block.
        hooked: why hooks within the layer prevent exporting it; empty if there are no such hooks.
    """

    model: nn.Module
    layer: nn.Module
    x: Tensor
    beside: Mapping[str, Tensor]
    y: Tensor
    in_tuple: bool
    blocks: Blocks
    hooked: str
    _leaves: Sequence[object]  # all arguments except `x`; the name of a tensor replaces the tensor
    _structure: pytree.TreeSpec

    def run(
        self, parameters: Mapping[str, Tensor], x: Tensor, beside: Mapping[str, Tensor]
    ) -> Tensor:
        """Call the layer as the model did, but with other tensors, and return its output.

        Args:
            parameters: the layer's parameters and buffers, by name.
            x: the layer's input, shape (batch, tokens, width).
            beside: the layer's other tensor arguments, by name.
        """
        leaves = [beside[n] if isinstance(n, _Name) else n for n in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        with plain_attention(self.model, self.blocks):
            found = torch.func.functional_call(self.layer, dict(parameters), (x, *args), kwargs)
        return output_of(found)

    def tensors_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Return the tensors among a later call's arguments, by name.

        Args:
            args, kwargs: arguments of the later call of this layer, without the first argument.

        Raises:
            LayerGraphError: when an argument that is not a tensor differs from the recorded call.
        """
        leaves, structure = _named_leaves(args, kwargs)
        found = {leaf.name: leaf.tensor for leaf in leaves if isinstance(leaf, _NamedTensor)}
        if structure != self._structure or _without_tensors(leaves) != list(self._leaves):
            raise LayerGraphError("the model calls its layers in another way than before")
        return found


class _Name(str):
    """The name of a tensor argument. Its type distinguishes it from a string argument."""

    __slots__ = ()


def decoder_layers(model: nn.Module) -> Sequence[nn.Module]:
    """Return the decoder layers of a model, which are its `ModuleList` with the most parameters.

    Raises:
        LayerGraphError: when the model has no `ModuleList`.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise LayerGraphError(f"{type(model).__name__} has no list of layers")
    largest: nn.ModuleList = max(lists, key=_parameter_count)
    return tuple(largest)


def _parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def layer_calls(
    model: nn.Module,
    ids: Tensor,
    mask: Tensor | None = None,
    blocks: Blocks = BLOCKS,
    *,
    positions: Tensor | None = None,
) -> list[LayerCall]:
    """Run a model's forward pass with `plain_attention` and record the call of each layer.

    Args:
        model: a causal language model of transformers.
        ids: token IDs, shape (batch, tokens).
        mask: padding or document mask (see `called_with`); None for no mask.
        blocks: decides when attention runs over blocks of queries, and the size of a block.
        positions: each token's position in its document, same shape as `ids`; None if each
            sequence is one document.

    Returns:
        The recorded calls, in order of the layers.

    Raises:
        LayerGraphError: when the model does not call each layer once, in order, with the output of
            the previous layer; or when a layer has hooks or an argument of an unsupported type.
    """
    layers = decoder_layers(model)
    if len(set(layers)) < len(layers):
        raise LayerGraphError("the model does not call its layers one after another, each once")
    calls: list[LayerCall] = []
    hooks = [
        layer.register_forward_hook(partial(_note, calls, model, blocks), with_kwargs=True)
        for layer in layers
    ]
    try:
        with plain_attention(model, blocks, packed=positions is not None), torch.no_grad():
            model(**called_with(ids, mask, positions))
    finally:
        for hook in hooks:
            hook.remove()
    if [call.layer for call in calls] != list(layers):
        raise LayerGraphError("the model does not call its layers one after another, each once")
    for before, after in pairwise(calls):
        if before.y.data_ptr() != after.x.data_ptr() or before.y.shape != after.x.shape:
            raise LayerGraphError("the model changes what goes from one layer to the next")
    return calls


def _note(
    calls: list[LayerCall],
    model: nn.Module,
    blocks: Blocks,
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    found: object,
) -> None:
    if not args or not isinstance(args[0], Tensor):
        raise LayerGraphError("the model calls its layers without a tensor as first argument")
    hooked = _hooked(layer)
    leaves, structure = _named_leaves(args[1:], kwargs)
    beside = {leaf.name: leaf.tensor for leaf in leaves if isinstance(leaf, _NamedTensor)}
    for leaf in leaves:
        if not isinstance(leaf, _NamedTensor | _PLAIN):
            raise LayerGraphError(f"it is called with a {type(leaf).__name__}")
    names = _without_tensors(leaves)
    in_tuple = isinstance(found, tuple)
    y = output_of(found)
    calls.append(
        LayerCall(model, layer, args[0], beside, y, in_tuple, blocks, hooked, names, structure)
    )


_PLAIN = bool | int | float | str | torch.dtype | None


class _NamedTensor(NamedTuple):
    name: str
    tensor: Tensor


def _named_leaves(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[object], pytree.TreeSpec]:
    """Flatten a call's arguments and name its tensors.

    Args:
        args, kwargs: arguments of a layer's call, without the first argument.

    Returns:
        The flattened arguments, with each tensor as a `_NamedTensor`, and their tree structure.
    """
    paths, structure = pytree.tree_flatten_with_path((args, kwargs))
    leaves: list[object] = []
    for path, leaf in paths:
        if isinstance(leaf, Tensor):
            keys = (str(getattr(key, "key", getattr(key, "idx", ""))) for key in path[1:])
            leaves.append(_NamedTensor(".".join(keys), leaf))
        else:
            leaves.append(leaf)
    return leaves, structure


def _without_tensors(leaves: Sequence[object]) -> list[object]:
    """Replace each named tensor in a list of arguments by the tensor's name."""
    return [_Name(leaf.name) if isinstance(leaf, _NamedTensor) else leaf for leaf in leaves]


def _hooked(layer: nn.Module) -> str:
    """Return a sentence that names the module with hooks within a layer; empty if none has hooks.

    A graph would ignore such hooks.

    Raises:
        LayerGraphError: when the layer itself has hooks, which would run in the recorded pass.
    """
    for name, module in layer.named_modules():
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        hooks += len(module._backward_hooks) + len(module._backward_pre_hooks)
        if module is layer and hooks > 1:  # `layer_calls` itself adds one hook
            raise LayerGraphError(f"there are hooks on its layer {type(layer).__name__}")
        if module is not layer and hooks:
            return f"there are hooks on its module {name}"
    return ""


def output_of(found: object) -> Tensor:
    """Return the output tensor of a layer.

    Args:
        found: a layer's return value: the output tensor, or a tuple that starts with the output.

    Raises:
        LayerGraphError: when the output is not a tensor.
    """
    first = found[0] if isinstance(found, tuple) else found
    if not isinstance(first, Tensor):
        raise LayerGraphError(f"it returns a {type(first).__name__} instead of a tensor")
    return first
