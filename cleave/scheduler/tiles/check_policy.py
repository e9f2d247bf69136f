"""The policy that decides which results are verified before use."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum
from typing import Final

from cleave.errors import UsageError
from cleave.scheduler.sessions.reputation import Reputation


class CheckScope(Enum):
    """Which results are verified. The enum values are the values of `--verify`."""

    AUTO = "auto"
    """All results if results cross a process boundary, and no results otherwise."""

    ALL = "all"
    SAMPLE = "sample"
    """A random share of the results of trusted devices (`Reputation.known`), and all results of
    other devices."""

    OFF = "off"


_USE: Final = "use auto, all, off, or sample:P with P above 0 and up to 1, as sample:0.1"


@dataclass(frozen=True, slots=True)
class Verification:
    """Settings for the verification of results.

    Attributes:
        scope: which results are verified.
        share: for `SAMPLE`, the share of trusted devices' results that are verified, in (0, 1].
    """

    scope: CheckScope = CheckScope.AUTO
    share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UsageError(f"a share of {self.share:g} of the results cannot be checked; {_USE}")

    @classmethod
    def of(cls, value: Verification | str | bool) -> Verification:
        """Parse a value of `--verify`. True means `auto` and False means `off`.

        Raises:
            UsageError: the value is not valid.
        """
        if isinstance(value, Verification):
            return value
        if isinstance(value, bool):
            return cls(CheckScope.AUTO if value else CheckScope.OFF)
        name, colon, number = value.partition(":")
        try:
            scope = CheckScope(name)
            if (scope is CheckScope.SAMPLE) != bool(colon):
                raise ValueError
            share = float(number) if colon else 1.0
            if not 0 < share <= 1:
                raise ValueError
        except ValueError:
            raise UsageError(f"--verify is {value!r}; {_USE}") from None
        return cls(scope, share)

    def active(self, crossed: bool) -> bool:
        """Return whether any results are verified.

        Args:
            crossed: whether results cross a process boundary.
        """
        return self.scope is not CheckScope.OFF and (crossed or self.scope is not CheckScope.AUTO)

    def wants(self, reputation: Reputation, rng: random.Random) -> bool:
        """Return whether to verify a result that has just arrived. Call only if `active` is True.

        Args:
            reputation: the reputation of the device that returned the result.
            rng: secret random generator. It is used only after the result has arrived, so no device
                can predict which results are verified.
        """
        if self.scope is not CheckScope.SAMPLE or not reputation.known:
            return True
        return rng.random() < self.share
