"""Servers for which Ray's nodes have no room: waited for, and not longer than is wanted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as some

from cleave.cluster.room import MOST_FAILED, check_cores, cores_of_each, fitted, no_room
from cleave.errors import UsageError


class WorkerGroupStartupTimeoutError(Exception):
    """As Ray Train names it."""


class WorkerGroupStartupFailedError(Exception):
    """As Ray Train names it."""


class ControllerError(Exception):
    """As Ray Train raises it."""

    def __init__(self, controller_failure: Exception) -> None:
        super().__init__(str(controller_failure))
        self.controller_failure = controller_failure


NO_ROOM = ControllerError(WorkerGroupStartupTimeoutError())
NOT_STARTED = ControllerError(WorkerGroupStartupFailedError("a worker died"))


@dataclass
class Tries:
    """Tries to start servers, with these outcomes; notes what is said of them."""

    outcomes: Iterator[Exception | None]
    said: list[str] = field(default_factory=list)
    stops_after: int = 10**9

    def fit(self) -> None:
        if (error := next(self.outcomes)) is not None:
            raise error

    def fitted(self) -> bool:
        return fitted(
            self.fit,
            lambda: len(self.said) >= self.stops_after,
            lambda: self.said.append("no room"),
            lambda error: self.said.append(str(error)),
        )


def test_a_training_begins_when_there_is_room() -> None:
    tries = Tries(iter([NO_ROOM, NO_ROOM, None]))
    assert tries.fitted()
    assert tries.said == ["no room"] * 2
    assert not list(tries.outcomes)


@pytest.mark.parametrize("error", [NO_ROOM, NOT_STARTED])
def test_one_that_does_not_begin_can_be_stopped(error: Exception) -> None:
    assert not Tries(iter([error, error, None]), stops_after=1).fitted()


@pytest.mark.parametrize("error", [ControllerError(ValueError("a bug")), OSError("no disk")])
def test_another_failure_is_not_tried_again(error: Exception) -> None:
    with pytest.raises(type(error)):
        Tries(iter([error])).fitted()


def test_servers_that_do_not_start_are_tried_again_a_few_times_and_not_for_want_of_room() -> None:
    tries = Tries(iter([NOT_STARTED] * MOST_FAILED))
    with pytest.raises(ControllerError, match="a worker died"):
        tries.fitted()
    assert tries.said == ["a worker died"] * (MOST_FAILED - 1)


def test_only_failures_in_succession_count() -> None:
    """As where a node is lost while servers start there, and another joins later."""
    few = [NOT_STARTED] * (MOST_FAILED - 1)
    assert Tries(iter([*few, NO_ROOM, *few, NO_ROOM, *few, None])).fitted()


@given(some.lists(some.integers(0, 64), max_size=8), some.integers(1, 8))
def test_each_server_has_as_many_cores_as_nodes_have_room_for(
    nodes: list[int], servers: int
) -> None:
    cores = cores_of_each(nodes, servers)
    assert cores >= 1
    if sum(nodes) < servers:
        with pytest.raises(UsageError, match=f"has only {sum(nodes)} cores"):
            check_cores(nodes, servers)
        assert cores == 1
        return
    check_cores(nodes, servers)
    assert sum(node // cores for node in nodes) >= servers  # there is room
    assert sum(node // (cores + 1) for node in nodes) < servers  # and none for more
    each = "1 core" if cores == 1 else f"{cores} cores"
    assert f"{servers} servers with {each} each" in no_room(nodes, servers, cores)
