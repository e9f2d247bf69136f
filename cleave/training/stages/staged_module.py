"""Replace a model's forward pass with one that runs by stages on the fleet.

`go_by_stages` replaces the class of the model object with a subclass whose `forward` runs on the
fleet. If a library has wrapped `forward`, the wrapper calls the original `forward` once the model
is restored.
"""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import nn

from cleave.graphs.model_state import HOOKS

ATTRIBUTE: Final = "_cleave_stages"


def passes_of(model: nn.Module) -> Any:
    """Return a model's `StagedForward`; None if the model is not offloaded by stages."""
    return vars(model).get(ATTRIBUTE)


def go_by_stages(model: nn.Module, passes: Callable[..., Any]) -> None:
    """Replace a model's `forward` with a `StagedForward` until `go_plainly` is called."""
    object.__setattr__(model, ATTRIBUTE, passes)
    model.__class__ = _staged_class(type(model))


def go_plainly(model: nn.Module) -> None:
    """Undo `go_by_stages` by restoring the model's class."""
    object.__delattr__(model, ATTRIBUTE)
    model.__class__ = type(model).__mro__[1]


@contextmanager
def plain(model: nn.Module) -> Iterator[None]:
    """Return a context manager that restores an offloaded model's original forward pass.

    Wrappers around `forward` and hooks registered on the model object are also disabled.
    """
    held, staged = vars(model), type(model)
    aside = (ATTRIBUTE, "forward", *HOOKS)
    before = {name: held.pop(name) for name in aside if name in held}
    held.update({name: type(before[name])() for name in HOOKS})
    model.__class__ = staged.__mro__[1]
    try:
        yield
    finally:
        held.update(before)
        model.__class__ = staged


def _staged_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a model's class whose `forward` calls the model's `StagedForward`."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A wrapper may still call this function after the model is restored.
        passes = passes_of(self) or kind.forward.__get__(self)
        return passes(*args, **kwargs)

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:  # noqa: N807
        """Copy or pickle the model as an object of its original class, without stages."""
        held = {name: value for name, value in vars(self).items() if name != ATTRIBUTE}
        return copyreg._reconstructor, (kind, object, None), held  # type: ignore[attr-defined]

    # Libraries inspect the signature of `forward`. If `functools.wraps` set `__wrapped__`,
    # libraries would unwrap `forward` and bypass the fleet.
    forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    forward.__doc__ = kind.forward.__doc__
    same = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(
        kind.__name__, (kind,), {**same, "forward": forward, "__reduce_ex__": __reduce_ex__}
    )
