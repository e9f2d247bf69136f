"""The simulator's interface for training methods, which turn `Conditions` into an `Outcome`.

An outcome has a time even if the method does not fit in the devices' memory. `Outcome.step_s` is
the duration of a step with enough memory. `Outcome.misfit` says why the memory is not enough.
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
"""Assumed throughput, in FLOP/s, of a parameter server without accelerators."""


@dataclass(frozen=True)
class Conditions:
    """The model, the batch and the fleet of a simulation.

    Attributes:
        spec: the model.
        batch, seq: sequences (samples) per step, and tokens per sequence.
        devices: rates of the fleet's devices, which cloud methods ignore. On compressed links, the
            rates count uncompressed bytes per second (`cleave.planner.coding.payload_rates`).
        element: bytes per element sent to devices and returned by devices.
        ps: rates of the parameter server's network card.
        seed: random seed of all searches.
        fp32_devices: rates of the same devices with fp32 throughput, for the layers of
            `cleave-stages`. Link rates count bytes on the wire, and flags mark the directions in
            which payloads are compressed. Empty means `devices`.
        ps_flops_per_s: throughput of the parameter server, for a loss that no device computes.
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
        """Return the fleet's rates as arrays, in which latencies are round-trip times."""
        return RateArrays.of(self.devices)


@dataclass(frozen=True, slots=True)
class Part:
    """A named part of the duration of a step or of a recovery."""

    name: str
    seconds: float


class UnderLosses(Protocol):
    """A method's own model of the duration of a step while devices are lost at random."""

    def with_losses_s(self, losses_per_s: float, detection_s: float) -> float:
        """Return the average seconds of a step; infinite if the step never ends.

        Args:
            losses_per_s: rate at which each single device is lost.
            detection_s: seconds from the loss of a device until the loss is detected.
        """
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """The simulated cost of one training step with one method.

    Attributes:
        method: method name with the variant in brackets, as in ``dtfm (serial)``.
        setting: text on the parallelism that the method's search chose.
        devices_used: number of fleet devices or cloud GPUs that the method uses.
        parts: consecutive parts of the step's duration; empty if the method has no plan.
        download_bytes, upload_bytes: bytes per device and step, as a mean over the used devices.
        memory_offered_bytes, memory_needed_bytes: memory that the tightest device offers and needs.
            This is the device with the highest ratio of needed to offered memory.
        misfit: text on why the memory is not enough, or why there is no plan; empty if the method
            fits.
        ps_egress_bytes_per_s, ps_ingress_bytes_per_s: load of the PS's network card in the busiest
            part of the step; 0 for methods without a PS.
        recovery: parts of the time that the loss of one device adds to a step, after the loss is
            detected; empty if not modelled.
        under_losses: the method's own model of losses; None means the formula of `churn`.
        flops: FLOPs of all used devices in a step, including recomputation; 0 if not counted.
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
        """Return the time in seconds that losing a device adds to a step; None if not modelled.

        The time to detect the loss is not included.
        """
        return math.fsum(part.seconds for part in self.recovery) if self.recovery else None

    @property
    def step_s(self) -> float:
        """Return the seconds of a step with enough memory; infinite if the method has no plan."""
        return math.fsum(part.seconds for part in self.parts) if self.parts else math.inf

    @property
    def fits(self) -> bool:
        return not self.misfit


class Method(Protocol):
    """A training method that the simulator can run."""

    @property
    def name(self) -> str:
        """Return the name by which users select the method, without a variant."""
        ...

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Simulate one step, and return an outcome per variant, with the main variant first."""
        ...


def impossible(method: str, reason: str) -> Outcome:
    """Return the outcome of a method without a plan.

    Args:
        method: name of the method.
        reason: text on why the method has no plan under the simulated conditions.
    """
    return Outcome(method, "", 0, (), 0.0, 0.0, 0.0, 0.0, reason)


def with_losses_s(outcome: Outcome, losses_per_s: float, detection_s: float) -> float | None:
    """Return the average seconds of a step while devices are lost at random.

    Args:
        outcome: simulated step without losses.
        losses_per_s: rate at which each single device is lost.
        detection_s: seconds from the loss of a device until the loss is detected.

    Returns:
        Average seconds; infinite if the step never ends, None if the method has no recovery model.
    """
    if outcome.recovery_s is None:
        return None
    if outcome.under_losses is not None:
        return outcome.under_losses.with_losses_s(losses_per_s, detection_s)
    lost = outcome.devices_used * losses_per_s * (detection_s + outcome.recovery_s)
    return outcome.step_s / (1 - lost) if lost < 1 else math.inf
