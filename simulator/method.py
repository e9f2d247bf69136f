"""What a method of training is to the simulator: conditions in, an `Outcome` out.

Feasibility is apart from time. `step_s` is what a step would take if memory were no matter;
`misfit` says why it cannot be done on the memory that was assumed, and is empty where it can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, TypeVar, cast

from cleave.planner.plan import DeviceRates, ElementBytes, PsRates
from cleave.planner.planner import TilePlanner
from cleave.planner.shape import RateArrays
from cleave.workload.registry import ModelSpec

Found = TypeVar("Found")


@dataclass(frozen=True)
class Conditions:
    """What is trained on what.

    Attributes:
        spec, batch, seq: the model; sequences per step and tokens in each.
        devices: the fleet; methods that bring their own machines ignore it.
        element: bytes per element sent and returned.
        ps: the parameter server's card.
        seed: of every search.
    """

    spec: ModelSpec
    batch: int
    seq: int
    devices: Sequence[DeviceRates]
    element: ElementBytes = field(default_factory=lambda: ElementBytes(2, 2))
    ps: PsRates = field(default_factory=PsRates)
    seed: int = 0
    _found: dict[Callable[[Conditions], object], object] = field(
        default_factory=dict, repr=False, compare=False
    )

    def once(self, what: Callable[[Conditions], Found]) -> Found:
        """What a function says of these conditions; worked out for the first that asks."""
        if what not in self._found:
            self._found[what] = what(self)
        return cast(Found, self._found[what])

    @cached_property
    def planner(self) -> TilePlanner:
        """That all methods with such tiles share, so that none plans what another one has."""
        return TilePlanner(self.ps)

    @cached_property
    def rates(self) -> RateArrays:
        """The fleet as arrays; its latency counts both ways."""
        return RateArrays.of(self.devices)


@dataclass(frozen=True, slots=True)
class Part:
    """What a share of a step's time goes to."""

    name: str
    seconds: float


class UnderLosses(Protocol):
    """What a method knows of its steps while devices leave."""

    def with_losses_s(self, losses_per_s: float, detection_s: float) -> float:
        """Seconds for a step when each device is lost so often; infinite where it never ends."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step takes by one method.

    Attributes:
        method: its name; with what is special about this row in brackets, as ``dtfm (serial)``.
        setting: what a search chose, for people.
        devices_used: of the fleet, or cloud GPUs.
        parts: of the step's time, one after another.
        download_bytes, upload_bytes: in a step, on average over the devices used.
        memory_offered_bytes: of the device with least for what it is to hold.
        memory_needed_bytes: by that device.
        misfit: why it cannot be done; empty where it can.
        ps_egress_bytes_per_s, ps_ingress_bytes_per_s: that the PS's card must carry in the busiest
            part; 0 for methods without one.
        recovery: what losing one device adds, from when that is noticed; empty where not modelled.
        under_losses: what a step takes with losses, where they are not taken one after another.
        flops: multiplied in a step by all devices used, what is recomputed included; 0 where nobody
            counts them.
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
        """What losing one device adds to a step, detection left out; None where not modelled."""
        return math.fsum(part.seconds for part in self.recovery) if self.recovery else None

    @property
    def step_s(self) -> float:
        """Seconds for one step, if memory were no matter; infinite where there is no plan."""
        return math.fsum(part.seconds for part in self.parts) if self.parts else math.inf

    @property
    def fits(self) -> bool:
        return not self.misfit


class Method(Protocol):
    """A way to train."""

    def outcomes(self, conditions: Conditions) -> list[Outcome]:
        """One step; several where the method has variants worth telling apart, best known first."""
        ...


def impossible(method: str, reason: str) -> Outcome:
    """A row for a method that has no plan at all under these conditions."""
    return Outcome(method, "", 0, (), 0.0, 0.0, 0.0, 0.0, reason)
