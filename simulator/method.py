"""What a training method is to the simulator: `Conditions` in, an `Outcome` out.

Time does not depend on feasibility: `step_s` is what a step would take with enough memory. `misfit`
says why the memory that was assumed is not enough; it is empty if it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Protocol

from cleave.planner.plan import DeviceRates, ElementBytes, PsRates
from cleave.planner.tiles.shape import RateArrays
from cleave.workload.registry import ModelSpec

PS_FLOPS_PER_S: Final = 500e9
"""What a parameter server without accelerators may reach."""


@dataclass(frozen=True)
class Conditions:
    """The model, the batch and the fleet of a simulation.

    Attributes:
        spec, batch, seq: the model; sequences per step and tokens in each.
        devices: the fleet; methods that bring their own machines ignore it. Where payloads travel
            coded, its links are as fast as they are for plain bytes
            (`cleave.planner.coding.payload_rates`).
        element: bytes per element sent and returned.
        ps: rates of the parameter server's card.
        seed: seed of every search.
        fp32_devices: the same devices with their throughput in fp32, in which layers by stages are
            computed; empty where it is that of `devices`. By their links, and which of these code.
        ps_flops_per_s: of the parameter server, which computes losses that no device holds.
    """

    spec: ModelSpec
    batch: int
    seq: int
    devices: Sequence[DeviceRates]
    element: ElementBytes = field(default_factory=lambda: ElementBytes(2, 2))
    ps: PsRates = field(default_factory=PsRates)
    seed: int = 0
    fp32_devices: Sequence[DeviceRates] = ()
    ps_flops_per_s: float = PS_FLOPS_PER_S

    @cached_property
    def rates(self) -> RateArrays:
        """Return the fleet's rates as arrays; their latency is that of both ways."""
        return RateArrays.of(self.devices)


@dataclass(frozen=True, slots=True)
class Part:
    """A named part of a step's time."""

    name: str
    seconds: float


class UnderLosses(Protocol):
    """A model of a method's steps while devices leave."""

    def with_losses_s(self, losses_per_s: float, detection_s: float) -> float:
        """Return the seconds of a step when devices are lost; infinite if it never ends."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step takes with one method.

    Attributes:
        method: its name, with the variant in brackets, as in ``dtfm (serial)``.
        setting: what a search chose, for people.
        devices_used: number of the fleet's devices, or of cloud GPUs.
        parts: parts of the step's time, one after another.
        download_bytes, upload_bytes: bytes of a device in a step, mean over the devices used.
        memory_offered_bytes: offered by the tightest device: the one with the least memory for what
            it holds.
        memory_needed_bytes: needed by that device.
        misfit: why the memory is not enough; empty if it is.
        ps_egress_bytes_per_s, ps_ingress_bytes_per_s: rates that the PS's card must carry in the
            busiest part; 0 for methods without a PS.
        recovery: what losing one device adds after it is noticed; empty if not modelled.
        under_losses: the method's own model of losses; None if they are taken one after another.
        flops: FLOPs of all devices used in a step, with what is recomputed; 0 if not counted.
    """

    method: str
    setting: str
    devices_used: int
    parts: tuple[Part, ...]
    download_bytes: float
    upload_bytes: float
    memory_offered_bytes: float
    memory_needed_bytes: float
    misfit: str = ""
    ps_egress_bytes_per_s: float = 0.0
    ps_ingress_bytes_per_s: float = 0.0
    recovery: tuple[Part, ...] = ()
    under_losses: UnderLosses | None = None
    flops: float = 0.0

    @property
    def recovery_s(self) -> float | None:
        """Return the seconds that a loss adds to a step, after detection; None if not modelled."""
        return math.fsum(part.seconds for part in self.recovery) if self.recovery else None

    @property
    def step_s(self) -> float:
        """Return the seconds of a step if memory is ignored; infinite if there is no plan."""
        return math.fsum(part.seconds for part in self.parts) if self.parts else math.inf

    @property
    def fits(self) -> bool:
        return not self.misfit


class Method(Protocol):
    """A way to train, as the simulator sees it."""

    @property
    def name(self) -> str:
        """Return its name, without variants."""
        ...

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Simulate one step.

        Return several rows if the method has variants that should be told apart, the best known
        first.
        """
        ...


def impossible(method: str, reason: str) -> Outcome:
    """Return a row for a method that has no plan at all under these conditions."""
    return Outcome(method, "", 0, (), 0.0, 0.0, 0.0, 0.0, reason)
