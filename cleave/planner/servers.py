"""Predict the step time when several servers share the devices and each batch.

The step time is the time of the slowest server's fleet plus the time of the exchange between the
servers. In the exchange, the owner of a parameter sums the gradients from all servers and sends the
new value to all servers, in fp32. If weights are shared, owners do not send new values. Instead,
servers gather the weights of each layer before each pass through it.
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
    """Sizes of a model whose weights are sharded across the servers.

    `gathered` assumes one micro-batch per step.

    Attributes:
        layers: number of layers.
        layer: number of parameters in one layer.
        outside: number of parameters outside the layers.
        recomputed_bytes: bytes of activations per sequence that the PS recomputes in the backward
            pass instead of retaining them.
    """

    layers: int
    layer: int
    outside: int
    recomputed_bytes: int = 0

    @property
    def gathered(self) -> int:
        """Return the number of parameters that servers gather in a step.

        Each layer except the last is gathered twice, once for each pass. The last layer and the
        parameters outside the layers are gathered once.
        """
        return self.outside + (2 * self.layers - 1) * self.layer

    @property
    def whole(self) -> int:
        """Return the maximum number of gathered parameters that a server holds at once."""
        return self.outside + self.layer


def exchanged_bytes(
    trained_parameters: int, servers: int, weights: SharedWeights | None = None
) -> int:
    """Return the number of bytes that each server sends, and also receives, in an exchange.

    `weights` is None if each server holds the whole model.
    """
    others = servers - 1
    of_weights = trained_parameters if weights is None else weights.gathered
    return round(_FP32_BYTES * (trained_parameters + of_weights) * others / servers)


def exchange_s(
    trained_parameters: int,
    servers: int,
    card: PsRates | None,
    weights: SharedWeights | None = None,
) -> float:
    """Return the time in seconds of the exchange between servers, assuming no other traffic.

    `card` contains the rates of each server's network card; None if it is never the bottleneck.
    """
    if card is None:
        return 0.0
    slowest = min(card.egress_bytes_per_s, card.ingress_bytes_per_s)
    return exchanged_bytes(trained_parameters, servers, weights) / slowest


def shares(devices: Sequence[DeviceRates], servers: int) -> list[list[DeviceRates]]:
    """Divide the devices among the servers in round-robin order."""
    return [list(devices[server::servers]) for server in range(servers)]


def weakest(parts: Sequence[Sequence[DeviceRates]]) -> list[int]:
    """Return the indices of the servers whose fleets could be slowest.

    The fleets of these servers have the lowest total downlink rate, uplink rate or throughput.
    """
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
    """The forecast of a step on several servers.

    Attributes:
        devices, rows: largest number of devices, and of sequences, on any server.
        exchanged_bytes: number of bytes that each server sends to the others in a step.
        server_bytes: memory of one server. Optimizer moments are sharded across the servers. So are
            weights if they are shared, and gradients unless the method is stages.
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
        """Return the reason why the slowest fleet cannot compute its share; empty if it can."""
        return self.slowest.refused

    @property
    def step_s(self) -> float:
        """Return the step time in seconds. The exchange starts after the slowest fleet's work."""
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
        rows: number of sequences in the whole batch.
        found: forecasts of the servers' fleets that could be slowest (see `weakest`).
        card: rates of each server's network card; None if it is never the bottleneck.
        weights: sizes of the shared weights; None if each server holds the whole model.
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
    """Return a sentence about whether more servers are faster and how long the exchange takes.

    `plans` are in ascending order of the number of servers.
    """
    plans = [plan for plan in plans if not plan.refused]
    if not plans:
        return "No number of servers can do a step."
    best = min(plans, key=lambda plan: plan.step_s)
    first = plans[0]
    faster = first.step_s / best.step_s
    if best is first:
        others = [plan for plan in plans if plan is not first]
        if not others:
            return f"A step takes {first.step_s:.3g} s on {counted(first.servers)}."
        least = min(others, key=lambda plan: plan.step_s)
        return (
            f"More servers are not faster: {counted(least.servers)} take {least.step_s:.3g} s, "
            f"including {least.exchange_s:.3g} s for their exchange, compared with "
            f"{first.step_s:.3g} s on {counted(first.servers)}."
        )
    return (
        f"{counted(best.servers)} are {faster:.2f} times as fast as {counted(first.servers)}; "
        f"their exchange takes {best.exchange_s / best.step_s:.0%} of a step, and their fleets the "
        f"rest: {best.slowest.bottleneck}."
    )


def counted(servers: int) -> str:
    """Return a number of servers as text, such as "1 server" or "2 servers"."""
    return "1 server" if servers == 1 else f"{servers} servers"
