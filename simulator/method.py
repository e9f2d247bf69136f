"""The simulator's interface for training methods: `Conditions` in, `Outcome` out.

Times do not depend on feasibility: `step_s` is the duration of a step given enough memory. `misfit`
says why the devices' memory is not enough; it is empty if the method fits.
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
"""Throughput assumed for a parameter server without accelerators."""


@dataclass(frozen=True)
class Conditions:
    """The model, the batch and the fleet of a simulation.

    Attributes:
        spec, batch, seq: the model, sequences per step and tokens per sequence.
        devices: the fleet; methods that bring their own machines ignore it. If payloads travel
            compressed, link rates are in plain bytes/s (`cleave.planner.coding.payload_rates`).
        element: bytes per element sent and returned.
        ps: rates of the parameter server's network card.
        seed: seed of every search.
        fp32_devices: the same devices with fp32 throughput, used for layers by stages; empty means
            `devices`. Link rates are raw, with flags for the directions that are compressed.
        ps_flops_per_s: throughput of the parameter server, for losses that no device computes.
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
        """Return the fleet's rates as arrays; latencies are for a round trip."""
        return RateArrays.of(self.devices)


@dataclass(frozen=True, slots=True)
class Part:
    """A named part of a step's time."""

    name: str
    seconds: float


class UnderLosses(Protocol):
    """A method's own model of step times while devices leave."""

    def with_losses_s(self, losses_per_s: float, detection_s: float) -> float:
        """Return the seconds of a step with device losses; infinite if it never ends."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """The cost of one step with one method.

    Attributes:
        method: method name, with the variant in brackets, as in ``dtfm (serial)``.
        setting: the search's choice, as text.
        devices_used: number of devices of the fleet, or of cloud GPUs.
        parts: consecutive parts of the step's time.
        download_bytes, upload_bytes: bytes per device and step, mean over the devices used.
        memory_offered_bytes: memory offered by the tightest device, which has the least memory for
            what it holds.
        memory_needed_bytes: memory needed by that device.
        misfit: why the memory is not enough; empty if it is.
        ps_egress_bytes_per_s, ps_ingress_bytes_per_s: rates that the PS's network card must carry
            in the busiest part; 0 for methods without a PS.
        recovery: time added by losing one device, after detection; empty if not modelled.
        under_losses: the method's own model of losses; None for the formula of `churn`.
        flops: FLOPs of all devices used in a step, including recomputation; 0 if not counted.
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
        """Return the seconds of a step, ignoring memory; infinite if the method has no plan."""
        return math.fsum(part.seconds for part in self.parts) if self.parts else math.inf

    @property
    def fits(self) -> bool:
        return not self.misfit


class Method(Protocol):
    """A training method that the simulator can run."""

    @property
    def name(self) -> str:
        """Return the method's name, without variants."""
        ...

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Simulate one step; return one row per variant, the best known variant first."""
        ...


def impossible(method: str, reason: str) -> Outcome:
    """Return a row for a method that has no plan under these conditions."""
    return Outcome(method, "", 0, (), 0.0, 0.0, 0.0, 0.0, reason)
