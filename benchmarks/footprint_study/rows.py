"""The rows of the study: simulated device usage for each set-up and method."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from benchmarks.footprint_study.setups import (
    DTYPE,
    EQUAL_SHARE,
    GPU,
    LINK_BYTES_PER_S,
    OTHER_SHARES,
    Setup,
)
from cleave.energy.account import CloudUsage, DeviceUsage
from cleave.workload.registry import find_model
from profiles.library import load_profile
from profiles.performance import Layout
from simulator.cloud import Cloud, Gpu
from simulator.method import Conditions, Outcome
from simulator.sweep import methods

METHODS = ("dtfm-all", "dtfm", "cleave", "cleave-2d", "cleave-stages")
# A tile is a matrix multiplication, so these methods train at the full multiplication speed.
_PLAIN: Final = ("cleave", "cleave-2d")
# So low that devices compute the loss, because the server's energy is not counted.
_PS_FLOPS_PER_S: Final = 1e9


@dataclass(frozen=True, slots=True)
class StudyRow:
    """The simulated training of a set-up with one method.

    Attributes:
        method: display name of the method.
        memory: offers (bytes per device) that all lead to this result.
        needed_bytes: largest amount of memory that a device needs.
        misfit: why the memory is not enough; empty if the method fits.
        step_s: time of one step in seconds, assuming enough memory.
        usage: usage of the devices in all steps, if training reaches `EQUAL_SHARE` of the
            multiplication speed.
        other_usages: maps every other share of the multiplication speed to the usage at that share.
    """

    setup: Setup
    method: str
    memory: tuple[int, ...]
    needed_bytes: float
    misfit: str
    step_s: float
    flops: float
    usage: DeviceUsage
    other_usages: Mapping[float, DeviceUsage] = field(default_factory=dict)

    def usage_at(self, share: float) -> DeviceUsage:
        """Return the devices' usage if training reaches `share` of the multiplication speed."""
        return self.usage if share == EQUAL_SHARE else self.other_usages[share]

    @property
    def fits(self) -> bool:
        return not self.misfit

    @property
    def duration_s(self) -> float:
        """Return the total time in seconds for all steps of the set-up."""
        return self.step_s * self.setup.steps

    @property
    def offered(self) -> str:
        """Return the memory per device of all offers as text, such as "12 or 3 GB"."""
        return " or ".join(f"{offer / 1e9:g}" for offer in self.memory) + " GB"


def rows_of(setup: Setup, seed: int) -> list[StudyRow]:
    """Simulate a set-up with all methods and memory offers, and return the rows.

    If a method's result is equal for two memory offers, both offers share a row. A `dtfm` row is
    left out if its result equals the result of the `dtfm-all` row.
    """
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
            row = replace(equal, other_usages=usages)
            in_all = row.method.replace("dtfm ", "dtfm-all ")
            if in_all != row.method and (in_all, row.usage) in ((r.method, r.usage) for r in found):
                continue  # `dtfm` chose the same plan as `dtfm-all`
            work = (row.method, row.usage, row.misfit)
            works = [(other.method, other.usage, other.misfit) for other in found]
            same = works.index(work) if work in works else None
            if same is None:
                found.append(row)
            else:
                found[same] = replace(row, memory=found[same].memory + row.memory)
    order = {row.method: at for at, row in reversed(list(enumerate(found)))}
    return sorted(found, key=lambda row: order[row.method])


def simulated(
    setup: Setup,
    offer: int,
    seed: int,
    speed: float = 1.0,
    names: Sequence[str] = METHODS,
    share: float = EQUAL_SHARE,
) -> Iterator[StudyRow]:
    """Simulate a set-up with one memory offer and yield a row for each method and variant.

    A set-up with one device yields only the row "alone", in which the device trains the whole
    model. Methods without a plan yield no row.

    Args:
        speed: factor for the devices' multiplication speed.
        share: training speed divided by multiplication speed, for set-ups with `trains_slower`.
    """

    def at(speed: float) -> Conditions:
        rates, spec = setup.rates(offer, speed), find_model(setup.model)
        return Conditions(
            spec, setup.batch, setup.seq, rates, seed=seed, ps_flops_per_s=_PS_FLOPS_PER_S
        )

    whole = speed * share if setup.trains_slower else speed
    of_tiles, of_layers = at(speed), at(whole)
    if setup.devices == 1:
        machine = Gpu(setup.title, setup.flops_per_s * whole, offer, 1.0, 1.0)
        alone = Cloud(machine, 1, 1.0).outcomes(of_layers)[0]
        yield _row(setup, offer, replace(alone, method="alone"), whole)
        return
    known = methods()
    for name in names:
        reached, conditions = (speed, of_tiles) if name in _PLAIN else (whole, of_layers)
        for outcome in known[name].outcomes(conditions):
            if math.isfinite(outcome.step_s):
                yield _row(setup, offer, outcome, reached)


def _row(setup: Setup, offer: int, outcome: Outcome, speed: float) -> StudyRow:
    used, steps = outcome.devices_used, setup.steps
    down, up = (each * used * steps for each in (outcome.download_bytes, outcome.upload_bytes))
    flops = outcome.flops * steps
    usage = DeviceUsage(
        setup.profile.name,
        used,
        outcome.step_s * steps * used,
        flops / (setup.flops_per_s * speed),
        (down + up) / LINK_BYTES_PER_S,
        down,
        up,
        network_bytes=None if outcome.method.startswith("cleave") else up,
    )
    return StudyRow(
        setup,
        outcome.method,
        (offer,),
        outcome.memory_needed_bytes,
        outcome.misfit,
        outcome.step_s,
        flops,
        usage,
    )


def gpu_usage(setup: Setup) -> CloudUsage:
    """Simulate a set-up's training on one A5000 that reaches `EQUAL_SHARE` of its speed."""
    profile = load_profile(GPU)
    model = profile.compute_model().model(DTYPE, DTYPE, Layout.NN)
    memory = profile.memory.installed_bytes or profile.memory.bytes
    conditions = Conditions(find_model(setup.model), setup.batch, setup.seq, ())
    card = Gpu(GPU, model.flops_per_s, memory, 1.0, 1.0)
    outcome = Cloud(card, 1, EQUAL_SHARE).outcomes(conditions)[0]
    return CloudUsage(profile, outcome.step_s * setup.steps)


def gpu_at(gpu: CloudUsage, share: float) -> CloudUsage:
    """Return the usage of the GPU if training reaches `share` of its multiplication speed."""
    return replace(gpu, time_s=gpu.time_s * EQUAL_SHARE / share)
