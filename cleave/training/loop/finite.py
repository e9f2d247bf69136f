"""Nothing that is not finite is used or saved: losses, gradients, weights, optimizer state."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from cleave.errors import CleaveError


class DivergedError(CleaveError):
    """Tells that a loss, a gradient or a weight of a run is not finite."""


def check_loss(loss: float) -> None:
    """Refuse to go on with a loss that is not finite.

    Raises:
        DivergedError: when it is not.
    """
    if not math.isfinite(loss):
        raise DivergedError(f"its loss is {loss}")


def check_norm(norm: float) -> None:
    """Refuse to update parameters by gradients that are not finite.

    Args:
        norm: of the gradients, which is finite only where all of them are.

    Raises:
        DivergedError: when it is not.
    """
    if not math.isfinite(norm):
        raise DivergedError(f"the norm of its gradients is {norm}")


def is_finite(tensor: Tensor) -> bool:
    """Say whether no element is NaN or infinite.

    It reads the tensor once and copies nothing, and so takes a twentieth of `isfinite().all()`.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(bool(end.isfinite()) for end in torch.aminmax(tensor.detach()))


def first_not_finite(tensors: Mapping[str, Tensor]) -> str:
    """Return the name of the first tensor with an element that is not finite; empty for none."""
    return next((name for name, tensor in tensors.items() if not is_finite(tensor)), "")
