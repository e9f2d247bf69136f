"""Replacement of a model's forward pass by one in stages, through a subclass of its class.

A later wrapper of the model's `forward` therefore wraps the passes on the fleet, and stays in place
when the model is restored.
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
    """Computes the forward passes of a model."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a forward pass."""
        ...

    def close(self) -> None:
        """Release what devices hold for the model."""
        ...


def passes_of(model: nn.Module) -> Passes | None:
    """Return the object that computes a model's passes by stages; None without stages."""
    found: Passes | None = vars(model).get(ATTRIBUTE)
    return found


def go_by_stages(model: nn.Module, passes: Passes) -> None:
    """Compute a model's forward passes by stages from now on."""
    object.__setattr__(model, ATTRIBUTE, passes)
    model.__class__ = _staged_class(type(model))


def go_plainly(model: nn.Module) -> None:
    """Undo `go_by_stages`."""
    object.__delattr__(model, ATTRIBUTE)
    model.__class__ = type(model).__mro__[1]


@contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """Return a context manager that disables a model's stages, forward wrappers and hooks."""
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
    """Return a subclass of a model's class that computes forward passes by stages."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A wrapper may still call this function after the model is restored.
        passes = passes_of(self) or kind.forward.__get__(self)
        return passes(*args, **kwargs)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:  # noqa: N807
        """Make copies and pickles plain models."""
        held = {name: value for name, value in vars(self).items() if name != ATTRIBUTE}
        return copyreg._reconstructor, (kind, object, None), held  # type: ignore[attr-defined]

    # Libraries inspect the signature, but must not unwrap the function to the plain forward.
    forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    forward.__doc__ = kind.forward.__doc__
    same = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(
        kind.__name__, (kind,), {**same, "forward": forward, "__reduce_ex__": __reduce_ex__}
    )
