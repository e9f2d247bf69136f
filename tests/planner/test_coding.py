"""Who is sent coded arrays, and told to code results: by feature, option and link."""

from __future__ import annotations

import pytest

from cleave.errors import UsageError
from cleave.planner.coding import LINK_BYTES_PER_S, CodingPolicy
from cleave.protocol import messages
from cleave.protocol.messages import Feature, Hello, Role
from cleave.scheduler.instructions import Send
from cleave.scheduler.session_manager import SessionManager

SLOW, FAST = LINK_BYTES_PER_S, 2 * LINK_BYTES_PER_S


def joined(
    coding: str, down: float, up: float, *features: str
) -> tuple[SessionManager, list[messages.Message]]:
    """A PS that a device has joined, and what it told the device."""
    manager = SessionManager(coding=coding)
    manager.opened(1, 0.0)
    hello = Hello(
        Role.DEVICE,
        ops=("matmul",),
        dtypes=("fp32",),
        memory_bytes=2**30,
        downlink_bytes_per_s=down,
        uplink_bytes_per_s=up,
        features=features,
    )
    done = manager.received(1, hello, 0.0)
    return manager, [one.message for one in done if isinstance(one, Send)]


@pytest.mark.parametrize(
    ("coding", "down", "up", "puts", "results"),
    [
        ("auto", SLOW, FAST, True, False),
        ("auto", FAST, SLOW, False, True),
        ("auto", FAST, FAST, False, False),
        ("on", FAST, FAST, True, True),
        ("off", SLOW, SLOW, False, False),
    ],
)
def test_each_way_by_its_rate(
    coding: str, down: float, up: float, puts: bool, results: bool
) -> None:
    manager, (welcome, *told) = joined(coding, down, up, "coding")
    assert isinstance(welcome, messages.Welcome)
    assert welcome.features == (() if coding == "off" else ("coding",))
    assert manager.sessions[1].codes_puts == puts
    assert told == ([messages.CodeResults()] if results else [])


@pytest.mark.parametrize("coding", CodingPolicy)
def test_a_device_without_the_feature_hears_nothing_of_it(coding: CodingPolicy) -> None:
    manager, told = joined(coding.value, SLOW, SLOW, "measure")
    assert [type(message) for message in told] == [messages.Welcome]
    assert not manager.sessions[1].codes_puts
    assert Feature.CODING not in manager.sessions[1].features


def test_other_words_are_refused() -> None:
    with pytest.raises(UsageError, match="--coding is 'yes'; use auto, on or off"):
        SessionManager(coding="yes")
