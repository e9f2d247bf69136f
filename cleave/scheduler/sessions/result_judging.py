"""Select the results to verify and decide what follows from a check. This module does no I/O."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from cleave.errors import UsageError
from cleave.protocol import messages
from cleave.protocol.codec import payload_bytes
from cleave.protocol.messages import ErrorCode
from cleave.scheduler import events
from cleave.scheduler.instructions import Check, Decision, Refuse
from cleave.scheduler.sessions.admission import Authenticator
from cleave.scheduler.sessions.device_history import DeviceHistory
from cleave.scheduler.sessions.reputation import Reputation, Wrong
from cleave.scheduler.sessions.session import Session
from cleave.scheduler.stages.work import StageOrder
from cleave.scheduler.tiles.tasks import Task
from cleave.verify import Judgement


class CheckScope(Enum):
    """The set of results to verify. The enum values are the names in `--verify`."""

    AUTO = "auto"  # all results if results cross a process boundary, and no results otherwise
    ALL = "all"
    # a random share of trusted devices' results (`Reputation.known`), all results of others
    SAMPLE = "sample"
    OFF = "off"


_USE: Final = "use auto, all, off, or sample:P with P above 0 and up to 1, such as sample:0.1"


@dataclass(frozen=True, slots=True)
class Verification:
    """Settings for the verification of results."""

    scope: CheckScope = CheckScope.AUTO
    # for `SAMPLE`, the share of trusted devices' results that are verified, in (0, 1]
    share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UsageError(f"{self.share:g} is not a valid share of results to verify; {_USE}")

    @classmethod
    def of(cls, value: Verification | str | bool) -> Verification:
        """Parse a value of `--verify`. True means `auto` and False means `off`.

        Raises:
            UsageError: if the value is not valid.
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
            raise UsageError(f"--verify {value!r} is not valid; {_USE}") from None
        return cls(scope, share)

    def active(self, crossed: bool) -> bool:
        """Return whether to verify results. `crossed` is True if results cross processes."""
        return self.scope is not CheckScope.OFF and (crossed or self.scope is not CheckScope.AUTO)

    def wants(self, reputation: Reputation, rng: random.Random) -> bool:
        """Return whether to verify a result that has just arrived. Verification must be active.

        Args:
            rng: secret random generator, so that devices cannot predict which results are verified.
        """
        if self.scope is not CheckScope.SAMPLE or not reputation.known:
            return True
        return rng.random() < self.share


NOT_ROUNDED: Final = "were not the right rounding of the product, far more than on an honest device"


def wrong_form(result: messages.Result | messages.Computed, task: Task) -> str:
    """Describe a result's wrong shape, dtype or size; return an empty string if all are correct."""
    detail = task.detail
    rows, columns, dtype = detail.rows, detail.columns, detail.out
    of_graph = isinstance(detail, StageOrder) and detail.name is None
    if isinstance(result, messages.Computed):
        return "" if of_graph else f"the result is missing: {rows}x{columns} {dtype} was requested"
    if of_graph:
        return "it sent a result for a task that returns none"
    nbytes = payload_bytes(result.payload)
    form = (result.rows, result.columns, result.dtype, nbytes)
    if form == (rows, columns, dtype, task.output_bytes):
        return ""
    return (
        f"the result is {result.rows}x{result.columns} {result.dtype} of {nbytes} bytes, "
        f"not {rows}x{columns} {dtype}"
    )


class ResultJudge:
    """Accepts or rejects checked results and counts wrong results against their devices."""

    def __init__(self, auth: Authenticator, history: DeviceHistory) -> None:
        self._auth = auth
        self._history = history

    def checked(self, session: Session, check: Check, judgement: Judgement) -> Sequence[Decision]:
        """Return the decisions that follow from the outcome `judgement` of a check."""
        fault, rounding = judgement.fault, session.rounding
        rounding.saw(judgement.spots, judgement.misrounded)
        if fault is None and not rounding.biased:
            session.reputation.was_right()
            payload = check.payload if judgement.mended is None else judgement.mended
            return [events.ResultArrived(session.id, check.run, payload)]
        if fault is None:
            reason = f"{rounding.misrounded} of {rounding.spots} elements {NOT_ROUNDED}"
            self._history.forget_rounding(session)
            return [
                events.RunFailed(session.id, check.run, reason, invalidated=True),
                Refuse(session.id, ErrorCode.QUARANTINED, reason),
            ]
        inputs = frozenset(array.id for array in check.task.inputs)
        if fault.gross or not session.suspects.explains(check.run, inputs):
            self.was_wrong(session, Wrong.GROSS if fault.gross else Wrong.SMALL, fault.reason)
            session.suspects.begin(inputs, max(session.expected, default=check.run))
        reason = f"a wrong result: {fault.reason}"
        failed = events.RunFailed(session.id, check.run, reason, invalidated=True)
        return [failed, *self.quarantine_if_due(session, fault.reason)]

    def was_wrong(self, session: Session, how: Wrong, reason: str) -> None:
        """Add a wrong result's penalty to its device, and report the fault to the authenticator."""
        session.reputation.was_wrong(how)
        if session.identity is not None:
            self._auth.faulted(session.identity, reason, how.value)

    def quarantine_if_due(self, session: Session, last: str) -> Sequence[Decision]:
        """Quarantine a device if its penalty points reach the limit. `last` is the latest fault."""
        reputation = session.reputation
        if not reputation.quarantined:
            return []
        wrong = "result" if reputation.wrong == 1 else "results"
        reason = f"quarantined after {reputation.wrong} wrong {wrong}; the last: {last}"
        return [Refuse(session.id, ErrorCode.QUARANTINED, reason)]
