"""Modelled links: order, rates, drift, loss, shared lines."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.planner.plan import PsRates
from emulator.activity import Activity, Direction, Presence, Transfer
from emulator.device_model import (
    PIECE_BYTES,
    Departure,
    FractionalNoise,
    Link,
    Shared,
    SharedLines,
    links_of,
)
from emulator.virtual import emulated
from profiles.fleet_device import FleetDevice, SharedBottleneck
from tests.emulator.fleets import submit_zeros, virtual, watched

DEVICE = FleetDevice("test", 1e9, 1e6, 5e5, 0.01, 2**30)
MESSAGES = st.lists(st.tuples(st.floats(0, 10), st.integers(1, 10**6)), min_size=1, max_size=30)


def drifting(sigma: float, hurst: float = 0.8, seed: int = 0) -> Link:
    noise = FractionalNoise(hurst, np.random.default_rng(seed))
    return Link(1e6, 0.0, sigma=sigma, interval_s=1.0, noise=noise)


# --- one link ---


@given(MESSAGES, st.sampled_from([0.0, 0.3]), st.sampled_from([0.0, 0.8]), st.integers(0, 99))
def test_messages_keep_their_order(
    given_messages: list[tuple[float, int]], jitter_s: float, sigma: float, seed: int
) -> None:
    device = replace(DEVICE, jitter_s=jitter_s, drift_sigma=sigma, drift_interval_s=0.5)
    link, _ = links_of(device, random.Random(seed), SharedLines())
    now_s = left_s = there_s = 0.0
    for gap_s, nbytes in given_messages:
        now_s += gap_s
        begin_s, end_s, arrives_s = link.transmit(now_s, nbytes)
        assert max(now_s, left_s) == begin_s < end_s
        assert arrives_s >= max(there_s, end_s + device.latency_s)
        left_s, there_s = end_s, arrives_s


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=30))
def test_a_busy_link_carries_its_rate(sizes: list[int]) -> None:
    link = Link(1e6, 0.25)
    last_s = [link.transmit(0.0, nbytes) for nbytes in sizes][-1][2]
    assert last_s == pytest.approx(sum(sizes) / 1e6 + 0.25)


def test_jitter_has_its_mean() -> None:
    link, _ = links_of(replace(DEVICE, jitter_s=0.02), random.Random(1), SharedLines())
    delays = []
    for i in range(4000):  # far apart: none waits for the one before it
        _, end_s, arrives_s = link.transmit(i * 10.0, 1)
        delays.append(arrives_s - end_s - DEVICE.latency_s)
    assert np.mean(delays) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("loss", [1e-4, 0.01, 0.2])
def test_loss_slows_as_tcp_does(loss: float) -> None:
    lossy, _ = links_of(replace(DEVICE, loss=loss), random.Random(0), SharedLines())
    mathis = 1460 / (2 * DEVICE.latency_s) * math.sqrt(1.5 / loss)
    assert lossy.bytes_per_s == pytest.approx(min(1e6 * (1 - loss), mathis))


# --- drift ---


@pytest.mark.slow
@pytest.mark.parametrize("hurst", [0.5, 0.8])
def test_means_over_longer_times_settle_as_slowly_as_published(hurst: float) -> None:
    """The variance of means over n values is n^(2H-2)."""
    rows = [FractionalNoise(hurst, np.random.default_rng(s)) for s in range(600)]
    values = np.array([[noise[i] for i in range(1024)] for noise in rows])
    for n in (1, 8, 64, 512):
        means = values.reshape(len(rows), -1, n).mean(axis=2)
        assert means.var() == pytest.approx(n ** (2 * hurst - 2), rel=0.2)


def test_the_rate_of_each_interval_is_what_its_noise_says() -> None:
    link, noise = drifting(0.5), FractionalNoise(0.8, np.random.default_rng(0))
    rates = [1e6 * math.exp(0.5 * noise[i] - 0.125) for i in range(5)]
    _, end_s, _ = link.transmit(0.25, round(0.75 * rates[0] + sum(rates[1:4]) + 0.5 * rates[4]))
    assert end_s == pytest.approx(4.5, abs=1e-5)


def test_long_emulations_do_not_keep_the_past_of_their_links() -> None:
    noise = FractionalNoise(0.8, np.random.default_rng(0))
    assert abs(noise[10**9]) < 10  # at once: what lies before was never looked at
    assert noise[10**9 + 5000] == noise[10**9 + 5000] != noise[10**9 + 5001]


def test_both_directions_of_a_seed_are_the_same_again_and_differ_from_one_another() -> None:
    device = replace(DEVICE, drift_sigma=0.5, uplink_bytes_per_s=1e6)
    (down, up), (again, _) = (links_of(device, random.Random(3), SharedLines()) for _ in range(2))
    taken = [link.transmit(0.0, 10**8)[1] for link in (down, up, again)]
    assert taken[0] == taken[2] != taken[1]


# --- shared lines ---


def line(rate: float, devices: int = 2) -> SharedBottleneck:
    return SharedBottleneck("line", rate, rate / 2, devices)


def busy(devices: list[FleetDevice], gemms: int = 1) -> list[Activity]:
    """Emulate a few GEMMs, block by block, and return what was seen of them."""
    fleet = emulated(devices, compute=False)
    seen = watched(fleet)
    for _ in range(gemms):
        submit_zeros(fleet, 400, 400, 400).result()
    virtual(fleet).settle()
    return seen


def transfers(seen: list[Activity], direction: Direction) -> list[Transfer]:
    return [t for t in seen if isinstance(t, Transfer) and t.direction is direction]


def test_devices_on_a_line_get_no_more_than_its_rate_together() -> None:
    devices = [replace(DEVICE, name=str(i), bottleneck=line(1.2e6, 4)) for i in range(4)]
    seen = busy(devices, 3)
    for direction, rate in ((Direction.DOWN, 1.2e6), (Direction.UP, 0.6e6)):
        moved = transfers(seen, direction)
        begin_s = min(t.begin_s for t in moved)
        for i, last in enumerate(sorted(moved, key=lambda t: t.end_s)):
            so_far = sum(t.nbytes for t in sorted(moved, key=lambda t: t.end_s)[: i + 1])
            assert so_far <= rate * (last.end_s - begin_s) * (1 + 1e-9)


def test_a_line_is_shared_fairly() -> None:
    """Two that are alike take the same time on one line, about twice what each takes alone."""
    alike = [replace(DEVICE, name=str(i), flops_per_s=1e12) for i in range(2)]
    ends = {}
    for shared in (False, True):
        together = [replace(d, bottleneck=line(1e6) if shared else None) for d in alike]
        moved = transfers(busy(together), Direction.UP)
        ends[shared] = [max(t.arrives_s for t in moved if t.device == d) for d in (1, 2)]
    assert ends[True][0] == pytest.approx(ends[True][1], rel=0.05)
    assert 1.5 * max(ends[False]) < max(ends[True]) < 2.5 * max(ends[False])


def test_the_servers_card_is_a_line_of_all() -> None:
    fleet = emulated([DEVICE] * 5, compute=False, ps=PsRates(1e6, 1e6))
    began_s, before = virtual(fleet).now_s, fleet.counters()
    submit_zeros(fleet, 300, 300, 300).result()
    sent = (fleet.counters() - before).downlink_bytes
    assert virtual(fleet).now_s - began_s >= sent / 1e6


def test_what_waits_for_a_line_goes_with_its_device() -> None:
    """What a device that vanished was still to be sent takes no one else's time."""
    devices = [replace(DEVICE, name=str(i), bottleneck=line(1e5)) for i in range(2)]
    fleet = emulated(devices, compute=False)
    seen = watched(fleet)
    future = submit_zeros(fleet, 400, 400, 400)
    virtual(fleet).lose(2, in_s=1.0)
    future.result()
    virtual(fleet).settle()
    gone_s = next(p.at_s for p in seen if isinstance(p, Presence) and not p.here)
    assert all(t.begin_s <= gone_s for t in seen if isinstance(t, Transfer) and t.device == 2)


def test_a_small_message_does_not_wait_for_all_of_a_large_one() -> None:
    """Both get half of the line: after the small one the large one has it alone."""
    shared, small, large = Shared(1e6), 4 * PIECE_BYTES, 40 * PIECE_BYTES
    ends_s: dict[int, float] = {}
    links = {n: Link(1e9, 0.0, shared=[shared]) for n in (large, small)}

    def note(nbytes: int, begin_s: float, end_s: float) -> None:
        ends_s[nbytes] = end_s

    going = {nbytes: Departure(nbytes, partial(note, nbytes)) for nbytes in links}
    turns = [(0.0, n) for n in links]
    while turns:
        now_s, n = turns.pop(0)
        if not going[n].depart(links[n], now_s):
            turns = sorted([*turns, (links[n].free_s, n)], key=lambda turn: turn[0])
    assert ends_s[small] == pytest.approx(2 * small / 1e6, rel=1e-6)
    assert ends_s[large] == pytest.approx((small + large) / 1e6, rel=1e-6)
