"""Checks that losses, gradients, weights and optimizer state are finite."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from cleave.errors import CleaveError


class DivergedError(CleaveError):
    """Raised when a loss, gradient, weight or optimizer state is NaN or infinite."""


def check_loss(loss: float) -> None:
    """Raise DivergedError if a loss is NaN or infinite."""
    if not math.isfinite(loss):
        raise DivergedError(f"its loss is {loss}")


def check_norm(norm: float) -> None:
    """Raise DivergedError if a gradient norm is NaN or infinite."""
    if not math.isfinite(norm):
        raise DivergedError(f"the norm of its gradients is {norm}")


def is_finite(tensor: Tensor) -> bool:
    """Return True if no element of a tensor is NaN or infinite.

    Unlike `tensor.isfinite().all()`, this function allocates no tensor of the same shape.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(bool(end.isfinite()) for end in torch.aminmax(tensor.detach()))


def first_not_finite(tensors: Mapping[str, Tensor]) -> str:
    """Return the name of the first tensor with a NaN or infinite element, or an empty string."""
    return next((name for name, tensor in tensors.items() if not is_finite(tensor)), "")
