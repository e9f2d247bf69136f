"""What a device did is added up and told apart figure by figure."""

from dataclasses import astuple

from hypothesis import given
from hypothesis import strategies as st

from cleave.protocol.device_counters import DeviceCounters

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
