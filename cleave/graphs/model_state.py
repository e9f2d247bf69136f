"""Digest everything that a graph depends on, to find cached graphs and detect model changes.

A graph stays valid as long as the module's code, plain attributes, tensor shapes, `requires_grad`,
training mode and hooks stay the same.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from importlib.metadata import PackageNotFoundError, version
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
import xxhash
from torch import Tensor, nn

# Packages whose version may affect the exported graphs.
EXPORTERS: Final = ("torch", "transformers", "onnx", "onnxscript", "onnx-ir", "peft", "numpy")

_DEPTH: Final = 6  # nesting depth below which attribute values are described by address

_INTERNAL: Final = frozenset(vars(nn.Module())) - {"training"}
HOOKS: Final = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
# Attributes for a layer's index, for gradient checkpointing, and for the folder from which
# transformers loaded a model. They do not affect the output.
_NOT_OF_THE_FUNCTION: Final = frozenset(
    {"layer_idx", "gradient_checkpointing", "_gradient_checkpointing_func", "name_or_path"}
)


def graph_key(
    module: nn.Module,
    held: Mapping[str, Tensor],
    x: Tensor,
    extras: Mapping[str, Tensor],
    sources: Sequence[ModuleType],
    *,
    path: str = "",
    without: Iterable[nn.Module] = (),
) -> str:
    """Return a digest of everything that the exported graph of a module depends on.

    Layers that differ only in their index have the same key. Training mode does not affect the key,
    because all graphs are exported in training mode.

    Args:
        held: the module's parameters and buffers, by name.
        x: the module's input, shape (batch, tokens, width).
        extras: the module's other tensor arguments, by name.
        sources: Python modules of Cleave whose code creates the graph.
        path: the module's name in the model. Some adapters keep this name in an attribute, which
            the digest leaves out.
        without: submodules that the graph does not compute.
    """
    left_out = {id(part) for each in without for part in each.modules()}
    described = {
        "modules": _modules(
            module, _Describer(path, _names_of(module)), left_out=left_out, without={"training"}
        ),
        # Graphs take floating-point tensors as fp32, so the floating-point dtype does not matter.
        "held": [
            [name, list(t.shape), t.is_floating_point() or str(t.dtype), t.requires_grad]
            for name, t in held.items()
        ],
        "tied": _tied(held, module),
        "x": list(x.shape[1:]),
        "extras": [
            [name, list(t.shape), str(t.dtype), t.shape[:1] == x.shape[:1]]
            for name, t in extras.items()
        ],
        "versions": {name: _version(name) for name in EXPORTERS},
        "ours": [digest(inspect.getsource(part)) for part in sources],
    }
    return digest(json.dumps(described, sort_keys=True))


def model_state(model: nn.Module, layers: Sequence[nn.Module]) -> str:
    """Return a digest of everything that the graphs of a model's decoder layers depend on.

    The digest covers the identity, shape, dtype, device and `requires_grad` of all tensors of the
    model. It covers neither the tensors' values (see `content`) nor code outside the layers and
    attention.
    """
    describer = _Describer("", _names_of(model))
    described = [
        [
            [name, id(t), list(t.shape), str(t.dtype), str(t.device), t.requires_grad]
            for name, t in _all_tensors(model)
        ],
        [_modules(layer, describer) for layer in layers],
        _attention(model, describer),
        [
            [id(hook) for kind in HOOKS for hook in getattr(module, kind).values()]
            for layer in layers
            for module in layer.modules()
        ],
    ]
    return digest(json.dumps(described, sort_keys=True))


def content(tensor: Tensor) -> bytes:
    """Return a non-cryptographic digest of a tensor's values."""
    plain = tensor.detach().contiguous()
    return xxhash.xxh3_128_digest(plain.view(-1).view(torch.uint8).numpy().data)


def digest(text: str) -> str:
    """Return the SHA-256 digest of a string as hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def _all_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the names and tensors of a model; a tied tensor occurs under each of its names."""
    parameters: list[tuple[str, Tensor]] = list(model.named_parameters(remove_duplicate=False))
    return parameters + list(model.named_buffers(remove_duplicate=False))


def _tied(held: Mapping[str, Tensor], module: nn.Module) -> list[list[str]]:
    """Return, for each tied tensor in `held`, all its names in the module."""
    names: dict[int, list[str]] = {id(tensor): [] for tensor in held.values()}
    for name, tensor in _all_tensors(module):
        if id(tensor) in names:
            names[id(tensor)].append(name)
    return [each for each in names.values() if len(each) > 1]


def _modules(
    module: nn.Module,
    describer: _Describer,
    *,
    left_out: Set[int] = frozenset(),
    without: Set[str] = frozenset(),
) -> list[Any]:
    """Describe the class, code and attributes of a module and its submodules.

    Modules with an `id` in `left_out`, and attributes in `without`, are omitted.
    """
    without = without | _INTERNAL | _NOT_OF_THE_FUNCTION
    return [
        [
            name,
            type(part).__qualname__,
            describer.source(type(part)),
            describer.of(type(part).forward, _DEPTH),
            {
                key: describer.of(value, _DEPTH)
                for key, value in vars(part).items()
                if key not in without
            },
        ]
        for name, part in module.named_modules()
        if id(part) not in left_out
    ]


def _attention(model: Any, describer: _Describer) -> Any:
    """Describe the attention function that is set in a model's configuration."""
    from transformers import AttentionInterface

    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return [name, describer.of(AttentionInterface().get(name), _DEPTH)]


def _names_of(module: nn.Module) -> dict[int, str]:
    return {id(part): name for name, part in module.named_modules()}


class _Describer:
    """Describes values as JSON. Two values with equal descriptions behave alike.

    A value of an unknown kind is described by its `repr`, which may contain its memory address.

    Args:
        path: name of a module. The name is removed from all descriptions.
        known: names of the modules that are described elsewhere, by `id`.
    """

    def __init__(self, path: str, known: Mapping[int, str]) -> None:
        self._path, self._known = path, known
        self._made: dict[int, tuple[object, Any]] = {}  # described values, which modules may share
        self._under_way: list[int] = []  # ids of the enclosing values, to detect reference cycles

    def of(self, held: Any, depth: int) -> Any:
        """Describe a value and up to `depth` levels of nested values.

        Deeper values are described only by their type and memory address.
        """
        if isinstance(held, bool | int | float | None):
            return held
        if isinstance(held, str):
            return self._without_path(held)
        if id(held) in self._known:
            return ["module", self._known[id(held)]]
        if (made := self._made.get(id(held))) is not None:
            return made[1]
        if id(held) in self._under_way:
            return ["itself", len(self._under_way) - self._under_way.index(id(held))]
        self._under_way.append(id(held))
        address = f"{type(held).__qualname__} at {id(held)}"
        described = self._described(held, depth - 1) if depth else address
        self._under_way.pop()
        self._made[id(held)] = held, described  # a reference keeps the id from being reused
        return described

    def source(self, kind: Any) -> str:
        """Return a digest of the source file of a class or function, or else its qualified name."""
        return _source(kind.__module__) or str(kind.__qualname__)

    def _described(self, held: Any, depth: int) -> Any:
        if isinstance(held, Tensor):
            values = "" if held.device.type == "meta" else content(held).hex()
            return ["tensor", list(held.shape), str(held.dtype), held.requires_grad, values]
        if isinstance(held, Mapping):
            return {str(key): self.of(value, depth) for key, value in held.items()}
        if isinstance(held, list | tuple):
            return [self.of(value, depth) for value in held]
        if isinstance(held, set | frozenset):
            return sorted(json.dumps(self.of(value, depth)) for value in held)
        if isinstance(held, torch.dtype | torch.device | torch.Size):
            return str(held)
        if isinstance(held, nn.Module):
            parts = [[self.source(type(p)), self.of(vars(p), depth)] for p in held.modules()]
            return ["unregistered", type(held).__qualname__, parts]
        if isinstance(held, type):
            return ["class", held.__module__, held.__qualname__, self.source(held)]
        if callable(held) and (function := self._function(held, depth)) is not None:
            return function
        if hasattr(held, "to_json_string"):  # a configuration of transformers
            return held.to_json_string()
        kind: Any = type(held)
        if hasattr(held, "__dict__") and kind.__repr__ is object.__repr__:
            return [kind.__qualname__, self.source(kind), self.of(vars(held), depth)]
        return self._without_path(repr(held))

    def _function(self, held: Any, depth: int) -> Any:
        """Describe a function, its closure and its defaults; return None for other objects."""
        if isinstance(held, functools.partial):
            parts = [held.func, held.args, held.keywords]
            return ["partial", *(self.of(part, depth) for part in parts)]
        if isinstance(held, MethodType):
            return ["method", self.of(held.__func__, depth), self.of(held.__self__, depth)]
        if not isinstance(held, FunctionType):
            named = getattr(held, "__qualname__", None)
            return named and ["builtin", str(getattr(held, "__module__", "")), named]
        caught = [_cell(cell) for cell in held.__closure__ or ()]
        parts = [held.__defaults__, held.__kwdefaults__, caught]
        return [
            "function",
            held.__module__,
            held.__qualname__,
            self.source(held),
            [self.of(part, depth) for part in parts],
            self._called(held),
        ]

    def _called(self, function: FunctionType) -> list[list[str]]:
        """Describe the global functions that a function uses, because they may be patched."""
        found = []
        for name in _names(function.__code__):
            called = function.__globals__.get(name)
            if isinstance(called, FunctionType):
                found.append([name, called.__module__, called.__qualname__, self.source(called)])
        return found

    def _without_path(self, text: str) -> str:
        return text.replace(self._path, "*") if self._path else text


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


def _names(code: CodeType) -> list[str]:
    """Return the global and attribute names in a function's code and in its nested functions."""
    inner = [name for part in code.co_consts if isinstance(part, CodeType) for name in _names(part)]
    return sorted({*code.co_names, *inner})


@functools.cache
def _source(name: str) -> str:
    """Return a digest of a Python module's source code, or "" if the source is unavailable."""
    module = sys.modules.get(name)
    try:
        return digest(inspect.getsource(module)) if module is not None else ""
    except (OSError, TypeError):
        return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
