"""A port that is in use, and an endpoint that starts again, are waited for, and not for ever."""

from __future__ import annotations

import pytest

from cleave.cluster.endpoints import PortInUseError, chosen_endpoints, retried
from cleave.errors import UsageError
from tests.server.clocks import Clock


class Starting:
    """A start that fails a number of times, with the time that passes meanwhile."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.failures, self.error, self.clock, self.said = failures, error, Clock(0.0), list[str]()

    def start(self) -> str:
        if self.failures:
            self.failures -= 1
            raise self.error
        return "started"

    def sleep(self, seconds: float) -> None:
        self.clock.now_s += seconds

    def tried(self) -> str:
        return retried(self.start, PortInUseError, 20.0, self.said.append, self.clock, self.sleep)


@pytest.mark.parametrize("failures", [0, 3])
def test_what_fails_for_a_while_is_tried_again_and_the_user_is_told_once(failures: int) -> None:
    starting = Starting(failures, PortInUseError("port 8766 is in use"))
    assert starting.tried() == "started"
    assert starting.said == ["port 8766 is in use"][:failures]


@pytest.mark.parametrize(
    ("error", "waits_s"), [(PortInUseError("in use"), 20.0), (UsageError("no such address"), 0.0)]
)
def test_what_goes_on_failing_or_fails_otherwise_is_told(error: Exception, waits_s: float) -> None:
    starting = Starting(1000, error)
    with pytest.raises(UsageError, match=str(error)):
        starting.tried()
    assert starting.clock() == waits_s


def test_servers_take_endpoints_on_their_nodes_and_never_the_same() -> None:
    assert chosen_endpoints(["a", "b"], ["b", "a"]) == [1, 0]
    assert chosen_endpoints(["a", "b"], ["b", "b"]) == [1, 0]
    assert chosen_endpoints(["a", "a", "b"], ["a", "c", "a"]) == [0, 2, 1]
