"""The loss scale for fp16, which keeps small gradients from underflowing.

The rule and the constants are those of `torch.amp.GradScaler`. This implementation also supports
updates of one parameter at a time. If the gradients of a step overflow, the step is skipped and the
loss scale is halved. After 2000 steps without overflow, the loss scale is doubled. See Micikevicius
et al., "Mixed Precision Training" (arXiv 1710.03740), section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cleave.errors import CleaveError

LOSS_SCALE: Final = "loss_scale"
"""Key of the loss scale's state in a checkpoint's metadata."""

_GROWTH: Final = 2.0
_BACKOFF: Final = 0.5
_GROWS_AFTER: Final = 2000  # steps without overflow
_LEAST: Final = 2.0**-14  # a smaller loss scale cannot be the cause of an overflow


@dataclass(slots=True)
class LossScale:
    """The factor by which the loss is multiplied before the backward pass.

    After the backward pass, gradients are divided by the same factor.

    Attributes:
        factor: the loss scale. It is a power of two, so that scaling rounds no values except those
            that underflow.
        since_overflow: number of updates since `factor` last changed.
        updates: total number of steps that have updated parameters.
    """

    factor: float = 65536.0
    since_overflow: int = 0
    updates: int = 0

    @property
    def exhausted(self) -> bool:
        """Return True if the loss scale is too small to be the cause of an overflow."""
        return self.factor < _LEAST

    def overflowed(self) -> None:
        """Halve the loss scale after a step whose gradients are not finite."""
        self.factor *= _BACKOFF
        self.since_overflow = 0

    def updated(self) -> None:
        """Count a step that has updated parameters. Double the loss scale after 2000 such steps."""
        self.updates += 1
        self.since_overflow += 1
        if self.since_overflow == _GROWS_AFTER:
            self.factor *= _GROWTH
            self.since_overflow = 0

    def state(self) -> dict[str, Any]:
        """Return all attributes as a JSON object, for a checkpoint's metadata."""
        return {
            "factor": self.factor,
            "since_overflow": self.since_overflow,
            "updates": self.updates,
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Load the state from a checkpoint.

        Args:
            state: the result of `state` when the checkpoint was written; None if the checkpoint has
                none.

        Raises:
            CleaveError: when `state` is None.
        """
        if state is None:
            raise CleaveError("the checkpoint has no loss scale, so it is not of a run in fp16")
        self.factor = float(state["factor"])
        self.since_overflow = int(state["since_overflow"])
        self.updates = int(state["updates"])
