"""The outer optimizer of DiLoCo (arXiv 2311.08105): SGD with Nesterov momentum on differences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from cleave.planner.local_updates import ExchangeKind

_RATE: Final = 0.7
_SPARSE_RATE: Final = 1.0
_PREFIX: Final = "optimizer.outer."  # of the momentum in a checkpoint


class OuterOptimizer:
    """Computes the change of the weights after a round, as `torch.optim.SGD` with Nesterov does.

    Args:
        rate: the outer learning rate.
        momentum: the outer momentum.
        parameters: the trained parameters by name.
    """

    def __init__(self, rate: float, momentum: float, parameters: Mapping[str, Tensor]) -> None:
        self._rate = rate
        self._momentum = momentum
        self._held = {n: torch.zeros_like(p, requires_grad=False) for n, p in parameters.items()}

    def change(self, name: str, difference: Tensor) -> Tensor:
        """Return the change of a parameter.

        `difference` is its value before the round minus its value after, averaged over devices.
        """
        held = self._held[name]
        held.mul_(self._momentum).add_(difference)
        return (difference + self._momentum * held).mul_(-self._rate)

    def tensors(self) -> dict[str, Tensor]:
        """Return the momentum by tensor name, for a checkpoint."""
        return {_PREFIX + name: held for name, held in self._held.items()}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the momentum from a checkpoint. It stays zero if the checkpoint has none."""
        for name, held in self._held.items():
            if (found := tensors.get(_PREFIX + name)) is not None:
                held.copy_(found)


def outer_optimizer(
    exchange: ExchangeKind, rate: float, momentum: float, parameters: Mapping[str, Tensor]
) -> OuterOptimizer:
    """Return the outer optimizer for a form of exchange.

    If the exchange is sparse, there is no momentum, because what devices keep has its effect.

    Args:
        rate: the outer learning rate; 0 for the published rate.
        momentum: the outer momentum, unless the exchange is sparse.
        parameters: the trained parameters by name.
    """
    if exchange is ExchangeKind.SPARSE:
        return OuterOptimizer(rate or _SPARSE_RATE, 0.0, parameters)
    return OuterOptimizer(rate or _RATE, momentum, parameters)
