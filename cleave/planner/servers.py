"""What several servers take for a step together: the slowest fleet, and what they exchange.

Each server has a part of the devices and of the sequences. Gradients are summed at the server that
owns a parameter, and new parameters spread from there: both are fp32, and of each a server sends
and receives all but what it owns. Where weights are shared, too, they are gathered for each pass
instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cleave.planner.forecast import Forecast
from cleave.planner.plan import DeviceRates, Method, PsRates

_FP32_BYTES: Final = 4
_MOMENT_BYTES: Final = 8  # of a parameter that is trained
_GRADIENT_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """What servers gather that share a model's weights, in a step of one micro-batch.

    Attributes:
        layers: how many.
        layer: parameters of each.
        outside: parameters outside the layers.
        recomputed_bytes: of activations of a row that are computed again instead of being kept.
    """

    layers: int
    layer: int
    outside: int
    recomputed_bytes: int = 0

    @property
    def gathered(self) -> int:
        """Return how many parameters are gathered: a layer's twice, but for the last one."""
        return self.outside + (2 * self.layers - 1) * self.layer

    @property
    def whole(self) -> int:
        """Return how many a server has that it does not own, at most."""
        return self.outside + self.layer


def exchanged_bytes(
    trained_parameters: int, servers: int, weights: SharedWeights | None = None
) -> int:
    """Return what each server sends to the others in a step, and receives from them."""
    others = servers - 1
    of_weights = trained_parameters if weights is None else weights.gathered
    return round(_FP32_BYTES * (trained_parameters + of_weights) * others / servers)


def exchange_s(
    trained_parameters: int,
    servers: int,
    card: PsRates | None,
    weights: SharedWeights | None = None,
) -> float:
    """Return how long that takes on the servers' cards, which carry nothing else meanwhile."""
    if card is None:
        return 0.0
    slowest = min(card.egress_bytes_per_s, card.ingress_bytes_per_s)
    return exchanged_bytes(trained_parameters, servers, weights) / slowest


def shares(devices: Sequence[DeviceRates], servers: int) -> list[list[DeviceRates]]:
    """Return the devices of each server: every n-th."""
    return [list(devices[server::servers]) for server in range(servers)]


def weakest(parts: Sequence[Sequence[DeviceRates]]) -> list[int]:
    """Return which parts of a fleet could be the slowest: least links, or least throughput."""
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
    """What so many servers take.

    Attributes:
        servers: how many.
        devices: of the largest part.
        rows: sequences of the server that does most.
        slowest: what the slowest server's fleet takes for its part.
        exchanged_bytes, exchange_s: see `exchanged_bytes` and `exchange_s`.
        server_bytes: memory of a server; they share the optimizer's moments, and gradients but by
            stages, where each server's devices send all of them; and weights where that was wanted.
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
        """Say why a part of the fleet cannot do its part; empty if each can."""
        return self.slowest.refused

    @property
    def step_s(self) -> float:
        """Return how long a step takes: nothing is exchanged before the last gradient is there."""
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
    """Return what so many servers take.

    Args:
        servers: how many.
        devices: of the whole fleet.
        rows: of the whole batch.
        found: what the fleets that could be slowest take for their part.
        trained_parameters: of the model.
        card: of each server.
        weights: where several servers share them; None where each has all.
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
    """Say in a sentence whether more servers pay, and what of a step the exchange is."""
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
    """Return so many servers in words."""
    return "1 server" if servers == 1 else f"{servers} servers"
