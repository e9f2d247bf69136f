"""Whether a client comes back, and when: the table of the document, as the code has it."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.device.session import least_wait_s
from cleave.protocol import limits
from cleave.protocol.device_counters import DeviceCounters
from cleave.protocol.features import ALL, agreed, may_send
from cleave.protocol.messages import (
    Bye,
    ByeCode,
    Drop,
    Error,
    ErrorCode,
    Feature,
    Hello,
    Measured,
    Role,
)

FOR_GOOD = [code for code in ErrorCode if code not in (ErrorCode.LIMIT, ErrorCode.PROTOCOL)]


@pytest.mark.parametrize(
    ("message", "least_s"),
    [
        (Bye(), 0.0),  # of a server that knows no codes
        (Bye("", ByeCode.CLOSING), 0.0),
        (Bye("", ByeCode.CLOSING, 2.5), 2.5),
        (Bye("", ByeCode("moving"), 7.0), 7.0),
        (Bye("", ByeCode.CLOSING, 1e300), limits.MAX_RETRY_AFTER_S),
        (Bye("", ByeCode.DRAINED, 5.0), None),
        (Bye("", ByeCode.MEASURED), None),
        (Bye("", ByeCode.LEAVING), None),
        (Error(ErrorCode.LIMIT, ""), 0.0),
        (Error(ErrorCode.LIMIT, "", 30.0), 30.0),
        (Error(ErrorCode.PROTOCOL, ""), 0.0),
        (Error(ErrorCode("tired"), ""), None),
        (Error(ErrorCode("tired"), "", 30.0), 30.0),
        *((Error(code, "", 30.0), None) for code in FOR_GOOD),
    ],
)
def test_whether_and_when(message: Bye | Error, least_s: float | None) -> None:
    assert least_wait_s(message) == least_s


def test_features_are_agreed_on() -> None:
    assert agreed(Hello(Role.DEVICE)) == frozenset()
    assert agreed(Hello(Role.DEVICE, features=("tea", "measure"))) == {Feature.MEASURE}
    assert agreed(Hello(Role.DEVICE, features=ALL)) == set(Feature)
    assert agreed(Hello(Role.DEVICE, measure=True)) == {Feature.MEASURE}  # as before features


def test_nobody_is_sent_a_message_of_a_feature_that_was_not_agreed_on() -> None:
    measured = Measured(1.0, 1.0, 1.0)
    assert not may_send(measured, frozenset())
    assert may_send(measured, frozenset({Feature.MEASURE}))
    assert may_send(Drop(()), frozenset())


counts = st.integers(0, 2**50)
some = st.builds(
    DeviceCounters, counts, counts.map(float), counts, counts, counts.map(float),
    counts.map(float), counts,
)  # fmt: skip


@given(some, some)
def test_what_was_done_between_two_snapshots_is_their_difference(
    earlier: DeviceCounters, done: DeviceCounters
) -> None:
    later = earlier + done
    assert later - earlier == done
    assert astuple(later) == tuple(map(sum, zip(astuple(earlier), astuple(done), strict=True)))
    assert earlier + DeviceCounters() == earlier
