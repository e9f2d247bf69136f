"""The loss scale for fp16, which keeps small gradients from underflowing.

It follows the rule and the constants of `torch.amp.GradScaler`, for updates of one parameter at a
time. A step whose gradients overflow is skipped and halves the scale; many steps in a row without
overflow double it. See Micikevicius et al., "Mixed Precision Training" (arXiv 1710.03740), 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cleave.errors import CleaveError

LOSS_SCALE: Final = "loss_scale"
"""Key of the loss scale's state in a checkpoint."""

_GROWTH: Final = 2.0
_BACKOFF: Final = 0.5
_GROWS_AFTER: Final = 2000  # steps without overflow
_LEAST: Final = 2.0**-14  # below it, the loss scale cannot cause an overflow


@dataclass(slots=True)
class LossScale:
    """The factor of the loss in its backward pass; gradients are divided by it afterwards.

    Attributes:
        factor: the scale; a power of two, so that scaling rounds only numbers that underflow.
        since_overflow: steps since the factor last changed.
        updates: total number of steps that updated parameters.
    """

    factor: float = 65536.0
    since_overflow: int = 0
    updates: int = 0

    @property
    def exhausted(self) -> bool:
        """Return whether the scale is so small that it cannot cause the overflow."""
        return self.factor < _LEAST

    def overflowed(self) -> None:
        """Halve the scale after a step whose gradients are not finite."""
        self.factor *= _BACKOFF
        self.since_overflow = 0

    def updated(self) -> None:
        """Count a step that updated the parameters; double the scale after many."""
        self.updates += 1
        self.since_overflow += 1
        if self.since_overflow == _GROWS_AFTER:
            self.factor *= _GROWTH
            self.since_overflow = 0

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "factor": self.factor,
            "since_overflow": self.since_overflow,
            "updates": self.updates,
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Load the state of a checkpoint.

        Raises:
            CleaveError: when the checkpoint has no such state.
        """
        if state is None:
            raise CleaveError("the checkpoint has no loss scale, so it is not of a run in fp16")
        self.factor = float(state["factor"])
        self.since_overflow = int(state["since_overflow"])
        self.updates = int(state["updates"])
