"""Who is sent how much when, through a card of which everyone gets an equal share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.planner.tiles.card import OwnLinks, SharedCard, equal_shares

RATES = st.lists(st.floats(1e3, 1e9), min_size=1, max_size=20)
NBYTES = st.floats(1.0, 1e9)


@given(most=RATES, total=st.floats(1e3, 1e10))
def test_shares_are_equal_but_for_those_who_can_take_less(most: list[float], total: float) -> None:
    shares = equal_shares(np.array(most), total)
    assert (shares <= most).all()
    assert shares.sum() == pytest.approx(min(total, sum(most)))
    less = shares[shares < np.array(most)]
    assert not len(less) or less == pytest.approx(shares.max())


@given(devices=st.lists(st.tuples(st.floats(1e3, 1e9), NBYTES), min_size=1, max_size=12),
       card=st.floats(1e3, 1e10))  # fmt: skip
def test_everything_is_sent_no_sooner_than_link_and_card_allow(
    devices: list[tuple[float, float]], card: float
) -> None:
    rates, nbytes = (np.array(each) for each in zip(*devices, strict=True))
    everyone = np.arange(len(rates))
    shared = SharedCard(nbytes, rates, card)
    last_s = shared.sent_s(everyone, nbytes)
    assert (last_s >= OwnLinks(rates).sent_s(everyone, nbytes) * (1 - 1e-6)).all()
    assert last_s.max() >= nbytes.sum() / card * (1 - 1e-6)
    half_s = shared.sent_s(everyone, nbytes / 2)
    assert (half_s <= last_s).all()
    if rates.sum() <= card:
        assert last_s == pytest.approx(nbytes / rates)


def test_a_device_that_has_everything_leaves_its_share_to_the_others() -> None:
    shared = SharedCard(np.array([10.0, 30.0]), np.array([100.0, 100.0]), 10.0)
    assert shared.sent_s(np.array([0, 1]), np.array([10.0, 30.0])) == pytest.approx([2.0, 4.0])
    assert shared.sent_s(np.array([1]), np.array([10.0])) == pytest.approx([2.0])
