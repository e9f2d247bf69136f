"""Device usage of a set-up with each method, from the simulator's times and bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from cleave.energy.account import CloudSpell, DeviceUsage
from cleave.workload.registry import find_model
from profiles.device_profile import DeviceProfile
from profiles.library import load_profile
from profiles.performance import Layout
from simulator.catalogue import methods
from simulator.cloud import Cloud, Gpu
from simulator.method import Conditions, Outcome
from simulator.study.setups import (
    DTYPE,
    EQUAL_SHARE,
    GPU,
    LINK_BYTES_PER_S,
    OTHER_SHARES,
    Offer,
    Setup,
)

METHODS = ("dtfm-all", "dtfm", "cleave", "cleave-2d", "cleave-stages")
_PLAIN: Final = ("cleave", "cleave-2d")
"""Methods that run at the full speed of multiplication, because a tile is a multiplication."""
_PS_FLOPS_PER_S: Final = 1e9
"""So slow that devices compute the loss, because the server's work is not counted."""


@dataclass(frozen=True, slots=True)
class StudyRow:
    """A set-up, trained with one method.

    Attributes:
        method: display name of the method.
        memory: the offer of memory; several offers if they make no difference.
        offered_bytes, needed_bytes: memory offered and needed by the tightest device.
        misfit: why that memory is not enough; empty if it is.
        through_ps: whether all traffic is with a parameter server, whose own energy is not counted.
        step_s: seconds of one step, ignoring memory.
        flops: FLOPs of all devices in all steps.
        usage: usage of the devices over all steps.
        other_spells: usages if training reaches a share other than `EQUAL_SHARE` of the speed in
            multiplication alone, by share.
    """

    setup: Setup
    method: str
    memory: tuple[Offer, ...]
    offered_bytes: float
    needed_bytes: float
    misfit: str
    through_ps: bool
    step_s: float
    flops: float
    usage: DeviceUsage
    other_spells: Mapping[float, DeviceUsage] = field(default_factory=dict)

    def spell_at(self, share: float) -> DeviceUsage:
        """Return the usage if training reaches this share of the speed in multiplication alone."""
        return self.usage if share == EQUAL_SHARE else self.other_spells[share]

    @property
    def fits(self) -> bool:
        return not self.misfit

    @property
    def duration_s(self) -> float:
        """Return the seconds of all steps."""
        return self.step_s * self.setup.steps

    @property
    def name(self) -> str:
        """Return the display name: the method and the offers of memory."""
        return f"{self.method}, {' or '.join(self.offered)}"

    @property
    def offered(self) -> list[str]:
        """Return each offer's memory per device as text."""
        return [f"{offer.memory_bytes / 1e9:g} GB" for offer in self.memory]


def rows_of(setup: Setup, seed: int) -> list[StudyRow]:
    """Return the rows of all methods and memory offers; offers with equal results share a row."""
    found: list[StudyRow] = []
    for offer in setup.offers:
        others = {
            share: {row.method: row.usage for row in simulated(setup, offer, seed, share=share)}
            for share in (OTHER_SHARES if setup.trains_slower else ())
        }
        for equal in simulated(setup, offer, seed):
            usages = {
                share: others.get(share, {}).get(equal.method, equal.usage)
                for share in OTHER_SHARES
            }
            row = replace(equal, other_spells=usages)
            if row.method.startswith("dtfm ") and any(_same_work(row, other) for other in found):
                continue  # same result as with all devices
            same = next((i for i, other in enumerate(found) if _alike(row, other)), None)
            if same is None:
                found.append(row)
            else:
                memory = found[same].memory + row.memory
                found[same] = replace(row, memory=memory)
    order = {row.method: at for at, row in reversed(list(enumerate(found)))}
    return sorted(found, key=lambda row: order[row.method])


def _same_work(row: StudyRow, other: StudyRow) -> bool:
    variant = row.method.removeprefix("dtfm ")
    return (other.method, other.usage) == (f"dtfm-all {variant}", row.usage)


def _alike(row: StudyRow, other: StudyRow) -> bool:
    return (row.method, row.usage, row.misfit) == (other.method, other.usage, other.misfit)


def simulated(
    setup: Setup,
    offer: Offer,
    seed: int,
    speed: float = 1.0,
    names: Sequence[str] = METHODS,
    share: float = EQUAL_SHARE,
) -> Iterator[StudyRow]:
    """Yield the rows of each method with one offer of memory, under the simulator's names.

    A single device does all the work itself. DT-FM appears in all variants, on all devices as
    published (`dtfm-all`) and on the fastest number of devices (`dtfm`).

    Args:
        speed: factor on the devices' speed in multiplication.
        names: names of methods.
        share: share of that speed reached in training whole layers, if `Setup.trains_slower`.
    """

    def at(speed: float) -> Conditions:
        rates, spec = setup.rates(offer, speed), find_model(setup.model)
        return Conditions(
            spec, setup.batch, setup.seq, rates, seed=seed, ps_flops_per_s=_PS_FLOPS_PER_S
        )

    whole = speed * share if setup.trains_slower else speed
    of_tiles, of_layers = at(speed), at(whole)
    if setup.devices == 1:
        machine = Gpu(setup.title, setup.flops_per_s * whole, offer.memory_bytes, 1.0, 1.0)
        alone = Cloud(machine, 1, 1.0).outcomes(of_layers)[0]
        yield _row(setup, offer, replace(alone, method="alone"), whole)
        return
    known = methods()
    for name in names:
        reached, conditions = (speed, of_tiles) if name in _PLAIN else (whole, of_layers)
        for outcome in known[name].outcomes(conditions):
            if math.isfinite(outcome.step_s):
                yield _row(setup, offer, outcome, reached)


def _row(setup: Setup, offer: Offer, outcome: Outcome, speed: float) -> StudyRow:
    used, steps = outcome.devices_used, setup.steps
    down, up = (each * used * steps for each in (outcome.download_bytes, outcome.upload_bytes))
    flops = outcome.flops * steps
    through_ps = outcome.method.startswith("cleave")
    usage = DeviceUsage(
        setup.profile.name,
        used,
        outcome.step_s * steps * used,
        flops / (setup.flops_per_s * speed),
        (down + up) / LINK_BYTES_PER_S,
        down,
        up,
        network_bytes=None if through_ps else up,
    )
    return StudyRow(
        setup,
        outcome.method,
        (offer,),
        outcome.memory_offered_bytes,
        outcome.memory_needed_bytes,
        outcome.misfit,
        through_ps,
        outcome.step_s,
        flops,
        usage,
    )


@dataclass(frozen=True, slots=True)
class GpuRun:
    """The same steps on the GPU.

    Attributes:
        needed_bytes, misfit: memory needed, and why it does not fit, as in `StudyRow`.
        cloud: the run, with the GPU at `EQUAL_SHARE` of its speed in multiplication.
    """

    needed_bytes: float
    misfit: str
    cloud: CloudSpell

    @property
    def installed_bytes(self) -> int:
        """Return the bytes of memory on the card."""
        memory = self.profile.memory
        return memory.installed_bytes or memory.bytes

    @property
    def profile(self) -> DeviceProfile:
        """Return the GPU's profile."""
        return self.cloud.profile

    def at(self, share: float) -> CloudSpell:
        """Return the run with the GPU at another share of its speed in multiplication."""
        return replace(self.cloud, time_s=self.cloud.time_s * EQUAL_SHARE / share)


def gpu_run(setup: Setup) -> GpuRun:
    """Return a set-up's run on the A5000, with the FLOPs of the simulator's clouds."""
    profile = load_profile(GPU)
    model = profile.compute_model().model(DTYPE, DTYPE, Layout.NN)
    memory = profile.memory.installed_bytes or profile.memory.bytes
    conditions = Conditions(find_model(setup.model), setup.batch, setup.seq, ())
    card = Gpu(GPU, model.flops_per_s, memory, 1.0, 1.0)
    outcome = Cloud(card, 1, EQUAL_SHARE).outcomes(conditions)[0]
    cloud = CloudSpell(profile, outcome.step_s * setup.steps)
    return GpuRun(outcome.memory_needed_bytes, outcome.misfit, cloud)
