"""The step time of several servers: the slowest fleet, and the exchange between the servers.

Each server has a share of the devices and of the sequences. The server that owns a parameter sums
its gradients and spreads its new value, both in fp32. Each of n servers sends and receives
(n - 1) / n of both. With shared weights, servers gather the weights for each pass instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cleave.planner.forecast import Forecast
from cleave.planner.plan import DeviceRates, Method, PsRates

_FP32_BYTES: Final = 4
_MOMENT_BYTES: Final = 8  # per trained parameter
_GRADIENT_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Weights that servers share, and gather in a step of one micro-batch.

    Attributes:
        layer: parameters of one layer.
        outside: parameters outside the layers.
        recomputed_bytes: bytes of activations per row that are recomputed instead of kept.
    """

    layers: int
    layer: int
    outside: int
    recomputed_bytes: int = 0

    @property
    def gathered(self) -> int:
        """Return the parameters gathered in a step: each layer twice, but the last layer once."""
        return self.outside + (2 * self.layers - 1) * self.layer

    @property
    def whole(self) -> int:
        """Return the most parameters that a server holds at a time in addition to its own."""
        return self.outside + self.layer


def exchanged_bytes(
    trained_parameters: int, servers: int, weights: SharedWeights | None = None
) -> int:
    """Return the bytes that each server sends to the others in a step; it receives as many."""
    others = servers - 1
    of_weights = trained_parameters if weights is None else weights.gathered
    return round(_FP32_BYTES * (trained_parameters + of_weights) * others / servers)


def exchange_s(
    trained_parameters: int,
    servers: int,
    card: PsRates | None,
    weights: SharedWeights | None = None,
) -> float:
    """Return the seconds of that exchange on the servers' cards, without other traffic."""
    if card is None:
        return 0.0
    slowest = min(card.egress_bytes_per_s, card.ingress_bytes_per_s)
    return exchanged_bytes(trained_parameters, servers, weights) / slowest


def shares(devices: Sequence[DeviceRates], servers: int) -> list[list[DeviceRates]]:
    """Return the devices of each server: every n-th device of the fleet."""
    return [list(devices[server::servers]) for server in range(servers)]


def weakest(parts: Sequence[Sequence[DeviceRates]]) -> list[int]:
    """Return the parts of a fleet that could be slowest: lowest link rates or lowest throughput."""
    sums = [
        (
            sum(rates.downlink_bytes_per_s for rates in part),
            sum(rates.uplink_bytes_per_s for rates in part),
            sum(rates.flops_per_s for rates in part),
        )
        for part in parts
    ]
    return sorted({min(range(len(parts)), key=lambda n: sums[n][what]) for what in range(3)})


@dataclass(frozen=True, slots=True)
class ServersPlan:
    """The forecast of a step on a number of servers.

    Attributes:
        devices: devices of the largest share.
        rows: sequences of the server with the largest share.
        slowest: the forecast of the slowest server's fleet.
        exchanged_bytes, exchange_s: see `exchanged_bytes` and `exchange_s`.
        server_bytes: memory of one server. Servers share the optimizer's moments, and the weights
            if asked. They share gradients except with stages, where each fleet returns them all.
    """

    servers: int
    devices: int
    rows: int
    slowest: Forecast
    exchanged_bytes: int
    exchange_s: float
    server_bytes: int

    @property
    def refused(self) -> str:
        """Return why a part of the fleet cannot do its share; empty if each can."""
        return self.slowest.refused

    @property
    def step_s(self) -> float:
        """Return the step time. The exchange begins after the last gradient has arrived."""
        return self.slowest.step_s + self.exchange_s


def plan_servers(
    servers: int,
    devices: int,
    rows: int,
    found: Sequence[Forecast],
    trained_parameters: int,
    card: PsRates | None,
    weights: SharedWeights | None = None,
) -> ServersPlan:
    """Return the forecast of a step on several servers.

    Args:
        devices: devices of the whole fleet.
        rows: sequences of the whole batch.
        found: forecasts of the fleets that could be slowest.
        weights: the shared weights; None if each server holds the whole model.
    """
    slowest = max(found, key=lambda each: each.step_s)
    shared = _MOMENT_BYTES + (0 if slowest.method is Method.STAGES else _GRADIENT_BYTES)
    spared = shared * trained_parameters * (servers - 1) / servers
    weights = weights if servers > 1 else None
    most_rows = -(-rows // servers)
    if weights is not None:
        spared_weights = weights.layers * weights.layer + weights.outside - weights.whole
        spared += _FP32_BYTES * spared_weights * (servers - 1) / servers
        spared += weights.recomputed_bytes * most_rows
    return ServersPlan(
        servers,
        -(-devices // servers),
        most_rows,
        slowest,
        exchanged_bytes(trained_parameters, servers, weights),
        exchange_s(trained_parameters, servers, card, weights),
        round(slowest.server_bytes - spared),
    )


def why(plans: Sequence[ServersPlan]) -> str:
    """Return a sentence on whether more servers pay, and the exchange's share of a step."""
    plans = [plan for plan in plans if not plan.refused]
    if not plans:
        return "No number of these can do a step."
    best = min(plans, key=lambda plan: plan.step_s)
    first = plans[0]
    faster = first.step_s / best.step_s
    if best is first:
        others = [plan for plan in plans if plan is not first]
        if not others:
            return f"A step takes {first.step_s:.3g} s on {counted(first.servers)}."
        least = min(others, key=lambda plan: plan.step_s)
        return (
            f"More servers do not pay: {counted(least.servers)} take {least.step_s:.3g} s, "
            f"{least.exchange_s:.3g} s of it for what they exchange, and "
            f"{counted(first.servers)} {first.step_s:.3g} s."
        )
    return (
        f"{counted(best.servers)} are {faster:.2f} times as fast as {counted(first.servers)}; "
        f"their exchange takes {best.exchange_s / best.step_s:.0%} of a step, and their fleets the "
        f"rest: {best.slowest.bottleneck}."
    )


def counted(servers: int) -> str:
    """Return a number of servers in words."""
    return "1 server" if servers == 1 else f"{servers} servers"
