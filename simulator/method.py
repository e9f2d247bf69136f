"""Interface for simulated training methods, which compute an `Outcome` from `Conditions`.

If a method does not fit in the devices' memory, `Outcome.step_s` is the time that a step would take
with enough memory, and `Outcome.misfit` describes the shortage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from cleave.planner.plan import DeviceRates, ElementBytes, PsRates
from cleave.planner.tiles.shape import RateArrays
from cleave.workload.registry import ModelSpec
from cleave.workload.stages import StageSizes

PS_FLOPS_PER_S: Final = 500e9  # assumed throughput of a parameter server without accelerators


@dataclass(frozen=True)
class Conditions:
    """The model, the batch and the fleet of a simulation.

    Attributes:
        batch, seq: sequences (samples) per step, and tokens per sequence.
        devices: rates of the fleet's devices; cloud methods ignore them. On compressed links, the
            rates count uncompressed bytes per second (`cleave.planner.coding.payload_rates`).
        element: bytes per element in each direction: sent to devices, and returned by devices.
        ps: rates of the parameter server's network card.
        fp32_devices: devices with fp32 throughput, for layer graphs. Link rates count bytes on the
            wire, and flags mark compressed directions. Empty to use `devices`.
        ps_flops_per_s: throughput of the parameter server, used if no device computes the loss.
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
        """Return the fleet's rates as arrays. Latencies in these arrays are round-trip times."""
        return RateArrays.of(self.devices)

    @property
    def fastest_links(self) -> npt.NDArray[np.intp]:
        """Return device indices by descending link rate (the lower of uplink and downlink)."""
        return np.argsort(-np.minimum(self.rates.uplink, self.rates.downlink), kind="stable")

    @property
    def graph_devices(self) -> Sequence[DeviceRates]:
        """Return the devices with rates for layer graphs, which run in fp32."""
        return self.fp32_devices or self.devices

    @property
    def stage_sizes(self) -> StageSizes:
        """Return the sizes of the model's layers."""
        return StageSizes(self.spec, self.seq, self.element.sent, self.element.sent)


@dataclass(frozen=True, slots=True)
class Part:
    """A named part of the duration of a step or of a recovery."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class TileLosses:
    """Model of a step's average duration if a device loss delays only the current phase.

    After a loss, the other devices recompute the lost tile. The delay of a phase does not depend on
    how many devices are lost in it. If each of n devices is lost at the rate lambda, a step takes

        T = sum over phases of  t + (1 - exp(-n lambda t)) (detection + tile again)

    Attributes:
        times: (duration in seconds, runs per step) of each phase: a GEMM or an attention pass.
        again_s: time in seconds to recompute a lost tile.
    """

    times: tuple[tuple[float, float], ...]
    devices: int
    again_s: float

    def with_losses_s(self, losses_per_s: float, detection_s: float) -> float:
        """Return the average time of a step in seconds if devices are lost at random.

        Args:
            losses_per_s: loss rate of each device, in losses per second (lambda).
            detection_s: time in seconds from the loss of a device until the PS detects the loss.
        """
        rate, delay_s = self.devices * losses_per_s, detection_s + self.again_s
        return math.fsum(n * (t - math.expm1(-rate * t) * delay_s) for t, n in self.times)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The simulated cost of one training step with one method.

    Attributes:
        method: method name with the variant in parentheses, such as ``dtfm (serial)``.
        setting: description of the parallelism that the method's search chose.
        devices_used: number of fleet devices or cloud GPUs that the method uses.
        parts: consecutive parts of the step's duration; empty if the method has no plan.
        download_bytes, upload_bytes: traffic of a device in a step, averaged over the used devices.
        memory_offered_bytes, memory_needed_bytes: memory of the device with the highest ratio of
            needed to offered memory.
        misfit: why the memory is not enough, or why no plan exists; empty if the method fits.
        ps_egress_bytes_per_s, ps_ingress_bytes_per_s: load of the PS's network card in the busiest
            part of the step; 0 for methods without a PS.
        recovery: parts of the time that the loss of one device adds to a step, after detection;
            empty if not modelled.
        under_losses: model of a step with losses; None to use the formula of `with_losses_s`.
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
    under_losses: TileLosses | None = None
    flops: float = 0.0

    @property
    def recovery_s(self) -> float | None:
        """Return the time (s) that a loss adds to a step after detection; None if not modelled."""
        return math.fsum(part.seconds for part in self.recovery) if self.recovery else None

    @property
    def step_s(self) -> float:
        """Return the step time (s), assuming enough memory; infinite if the method has no plan."""
        return math.fsum(part.seconds for part in self.parts) if self.parts else math.inf

    @property
    def fits(self) -> bool:
        return not self.misfit


class Method(Protocol):
    """A simulated training method. Users select a method, with all its variants, by `name`."""

    @property
    def name(self) -> str: ...

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """Simulate one step and return one outcome per variant. The main variant is first."""
        ...


def best(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the fastest outcome that fits in memory, or else the fastest outcome."""
    return min(outcomes, key=lambda outcome: (not outcome.fits, outcome.step_s))


def impossible(method: str, reason: str) -> Outcome:
    """Return the outcome of a method that has no plan, with `reason` as the explanation."""
    return Outcome(method, "", 0, (), 0.0, 0.0, 0.0, 0.0, reason)


def with_losses_s(outcome: Outcome, losses_per_s: float, detection_s: float) -> float | None:
    """Return the average time of a step in seconds if devices are lost at random.

    If each of n devices is lost at a constant rate lambda, including during recovery, this time is

        T = step / (1 - n lambda (detection + recovery))

    The formula is exact if recoveries do not overlap. For a method that can recover from several
    losses at once, `Outcome.under_losses` replaces it.

    Args:
        losses_per_s: loss rate of each device, in losses per second (lambda).
        detection_s: time in seconds from the loss of a device until the PS detects the loss.

    Returns:
        Average time; infinite if losses are too frequent for the step to end, None if the method
        has no recovery model.
    """
    if outcome.recovery_s is None:
        return None
    if outcome.under_losses is not None:
        return outcome.under_losses.with_losses_s(losses_per_s, detection_s)
    lost = outcome.devices_used * losses_per_s * (detection_s + outcome.recovery_s)
    return outcome.step_s / (1 - lost) if lost < 1 else math.inf
