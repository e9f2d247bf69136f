"""A model whose forward pass goes by stages: the same object, with a class that does so.

The class is a subclass of the model's own. So whatever wraps the model's `forward` afterwards wraps
the passes on the fleet, and stays in place when the model is restored.
"""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

from torch import nn

ATTRIBUTE: Final = "_cleave_stages"
_HOOKS: Final = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class Passes(Protocol):
    """Does the forward passes of a model."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do a forward pass."""
        ...

    def close(self) -> None:
        """Release what devices hold."""
        ...


def passes_of(model: nn.Module) -> Passes | None:
    """Return what does a model's forward passes by stages; None where it is not offloaded so."""
    found: Passes | None = vars(model).get(ATTRIBUTE)
    return found


def go_by_stages(model: nn.Module, passes: Passes) -> None:
    """Let a model's forward passes go by stages."""
    object.__setattr__(model, ATTRIBUTE, passes)
    model.__class__ = _staged_class(type(model))


def go_plainly(model: nn.Module) -> None:
    """Undo `go_by_stages`."""
    object.__delattr__(model, ATTRIBUTE)
    model.__class__ = type(model).__mro__[1]


@contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """Let an offloaded model compute alone for a while: without its wrappers and its own hooks."""
    held, staged = vars(model), type(model)
    aside: Sequence[str] = (ATTRIBUTE, "forward", *_HOOKS)
    before = {name: held.pop(name) for name in aside if name in held}
    held.update({name: type(before[name])() for name in _HOOKS})
    model.__class__ = staged.__mro__[1]
    try:
        yield
    finally:
        held.update(before)
        model.__class__ = staged


def _staged_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a model's class whose forward passes go by stages."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A wrapper of this function may outlive the offloading.
        passes = passes_of(self) or kind.forward.__get__(self)
        return passes(*args, **kwargs)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:  # noqa: N807
        """Let copies and pickles be plain models."""
        held = {name: value for name, value in vars(self).items() if name != ATTRIBUTE}
        return copyreg._reconstructor, (kind, object, None), held  # type: ignore[attr-defined]

    # Libraries look at the signature, and must not look through to the plain forward.
    forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    forward.__doc__ = kind.forward.__doc__
    same = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(
        kind.__name__, (kind,), {**same, "forward": forward, "__reduce_ex__": __reduce_ex__}
    )
