"""Several servers: what they exchange, and when they pay."""

from __future__ import annotations

import pytest

from cleave.planner.forecast import Forecast
from cleave.planner.plan import DeviceRates, Method, PsRates
from cleave.planner.servers import (
    ServersPlan,
    SharedWeights,
    exchange_s,
    exchanged_bytes,
    plan_servers,
    shares,
    weakest,
    why,
)

CARD = PsRates(1e9, 2e9)


def plan(servers: int, step_s: float, card: PsRates | None = CARD) -> ServersPlan:
    found = [Forecast(Method.STAGES, step_s * part, server_bytes=10_000) for part in (0.5, 1.0)]
    return plan_servers(servers, 10, 7, found, 1000, card)


def test_each_server_sends_gradients_and_parameters_of_all_but_what_it_owns() -> None:
    assert exchanged_bytes(1000, 1) == 0
    assert exchanged_bytes(1000, 2) == 4000
    assert exchanged_bytes(1000, 4) == 6000
    assert exchange_s(10**9, 2, CARD) == pytest.approx(4.0)  # the slower way counts
    assert exchange_s(10**9, 2, None) == exchange_s(10**9, 1, CARD) == 0.0


def test_the_slowest_part_makes_the_step_and_moments_are_shared() -> None:
    found = plan(4, 3.0)
    assert (found.devices, found.rows) == (3, 2)
    assert found.step_s == 3.0 + found.exchange_s
    assert found.server_bytes == 10_000 - 6000


def test_shared_weights_are_gathered_for_each_pass_and_spare_memory() -> None:
    weights = SharedWeights(layers=4, layer=200, outside=200, recomputed_bytes=10)
    assert exchanged_bytes(1000, 2, weights) == 2 * (200 + 200 + 3 * 400 + 1000)
    assert exchange_s(1000, 2, CARD, weights) == exchanged_bytes(1000, 2, weights) / 1e9
    found = [Forecast(Method.TILES, 1.0, server_bytes=20_000)]
    plain, sharded = (plan_servers(2, 10, 7, found, 1000, CARD, w) for w in (None, weights))
    assert plain.server_bytes == 20_000 - 6000
    # Half of what is neither whole nor this server's, and four rows of activations.
    assert sharded.server_bytes == plain.server_bytes - 4 * 600 // 2 - 40
    one, alone = (plan_servers(1, 10, 7, found, 1000, CARD, w) for w in (None, weights))
    assert one == alone  # it has nobody to share with


def test_every_device_is_in_one_share_and_weak_ones_are_looked_at() -> None:
    devices = [DeviceRates(n, 1e6 * (n + 1), 1e6, 1e9) for n in range(10)]
    devices[3] = DeviceRates(3, 1e9, 1e6, 1.0)
    parts = shares(devices, 4)
    assert sorted(rates.device for part in parts for rates in part) == list(range(10))
    assert weakest(parts) == sorted({2, 3})  # least uplink; least throughput


def test_it_is_said_when_more_servers_pay_and_when_not() -> None:
    assert "2 servers are 1.96 times as fast as 1 server" in why(
        [plan(1, 10.0, None), plan(2, 5.1, None)]
    )
    said = why([plan(1, 10.0), plan(2, 9.9999999), plan(4, 20.0)])
    assert said.startswith("More servers are not faster: 2 servers take 10 s")
    infinite = [Forecast(Method.STAGES, float("inf"), refused="too small")]
    refused = plan_servers(8, 10, 7, infinite, 1000, CARD)
    assert refused.refused == "too small"
    assert why([plan(1, 10.0), refused]) == "A step takes 10 s on 1 server."
    assert why([refused]) == "No number of servers can do a step."
