"""The factor of the loss in fp16, without which small gradients would be zero.

The rule of `torch.amp.GradScaler`, with its numbers, and for updates of one parameter at a time: a
step whose gradients overflow is left out and halves the factor; many in a row that do not double
it. See Micikevicius et al., "Mixed Precision Training" (arXiv 1710.03740), section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cleave.errors import CleaveError

LOSS_SCALE: Final = "loss_scale"
"""The name of its state in a checkpoint."""

_GROWTH: Final = 2.0
_BACKOFF: Final = 0.5
_GROWS_AFTER: Final = 2000  # steps without overflow
_LEAST: Final = 2.0**-14  # where gradients overflow below it, the loss scale is not the reason


@dataclass(slots=True)
class LossScale:
    """What the loss is multiplied by before its backward pass, and gradients are divided by after.

    Attributes:
        factor: it; a power of two, so that it changes no bit of a number that is not too small.
        since_overflow: steps done since it changed.
        updates: steps that updated parameters, in all.
    """

    factor: float = 65536.0
    since_overflow: int = 0
    updates: int = 0

    @property
    def exhausted(self) -> bool:
        """Say whether a smaller factor would help no more."""
        return self.factor < _LEAST

    def overflowed(self) -> None:
        """Note that a step's gradients are not finite."""
        self.factor *= _BACKOFF
        self.since_overflow = 0

    def updated(self) -> None:
        """Note that a step updated the parameters."""
        self.updates += 1
        self.since_overflow += 1
        if self.since_overflow == _GROWS_AFTER:
            self.factor *= _GROWTH
            self.since_overflow = 0

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        return {
            "factor": self.factor,
            "since_overflow": self.since_overflow,
            "updates": self.updates,
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on as a checkpoint was left.

        Raises:
            CleaveError: when the checkpoint has no such state.
        """
        if state is None:
            raise CleaveError("the checkpoint has no loss scale, so it is not of a run in fp16")
        self.factor = float(state["factor"])
        self.since_overflow = int(state["since_overflow"])
        self.updates = int(state["updates"])
