"""Servers for which Ray's nodes have no room: waited for, and not longer than is wanted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cleave.cluster.room import fitted


class WorkerGroupStartupTimeoutError(Exception):
    """As Ray Train names it."""


class ControllerError(Exception):
    """As Ray Train raises it."""

    def __init__(self, controller_failure: Exception) -> None:
        self.controller_failure = controller_failure


NO_ROOM = ControllerError(WorkerGroupStartupTimeoutError())


def fits(outcomes: Iterator[Exception | None]) -> None:
    if (error := next(outcomes)) is not None:
        raise error


def test_a_training_begins_when_there_is_room() -> None:
    waited: list[None] = []
    outcomes = iter([NO_ROOM, NO_ROOM, None])
    assert fitted(lambda: fits(outcomes), lambda: False, lambda: waited.append(None))
    assert len(waited) == 2
    assert not list(outcomes)


def test_one_that_has_no_room_can_be_stopped() -> None:
    outcomes = iter([NO_ROOM, NO_ROOM, NO_ROOM, None])
    asked = iter([False, True])
    assert not fitted(lambda: fits(outcomes), lambda: next(asked), lambda: None)


@pytest.mark.parametrize("error", [ControllerError(ValueError("a bug")), OSError("no disk")])
def test_another_failure_is_not_tried_again(error: Exception) -> None:
    with pytest.raises(type(error)):
        fitted(lambda: fits(iter([error])), lambda: False, lambda: None)
