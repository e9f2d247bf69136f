"""Input values of the study, with the source and certainty of each value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from cleave.energy.assumptions import Assumptions, Figure
from cleave.energy.typical import Typical
from profiles.device_profile import DeviceKind
from profiles.library import load_profile
from simulator.study.conditions import grids
from simulator.study.dependence import GPU_LEAST, PS_W, WAITING_PHONE_W
from simulator.study.setups import EQUAL_SHARE, GPU, LINK_BYTES_PER_S, Setup, SetupScope


class Standing(Enum):
    """Certainty of an input value."""

    STATED = "stated by the paper"
    PUBLISHED = "published"
    STAND_IN = "published of something else, which stands in"
    UNCONFIRMED = "not confirmed"
    CHOSEN = "chosen"


@dataclass(frozen=True, slots=True)
class Input:
    """An input value of the study, as strings for the report.

    Attributes:
        used: the value, with its unit.
        range: range of the value in the sensitivity analysis; empty if the value is not varied.
        source: publication or measurement that supplies the value; may be empty if the value was
            chosen.
    """

    name: str
    used: str
    range: str
    standing: Standing
    source: str


_DOING = {
    DeviceKind.LAPTOP: "solving equations (HPL) on their processors, not on their GPUs",
    DeviceKind.PHONE: "in games",
}


def inputs(scope: SetupScope, made: Assumptions, typical: Typical) -> list[Input]:
    """Return all input values, in the order of the report."""
    found = [
        Input(
            "links", f"{LINK_BYTES_PER_S / 1e6:g} MB/s each way; no latency, none is stated", "",
            Standing.STATED, "arXiv 2507.01803",
        ),
        Input(
            "Wi-Fi of a device",
            f"{typical.radio_w[DeviceKind.PHONE]:g} W while it sends or receives", "",
            Standing.STATED, "arXiv 2507.01803, an assumption there",
        ),
    ]  # fmt: skip
    by_kind = {setup.profile.kind: setup for setup in scope.setups}
    for setup in by_kind.values():
        found += _of_devices(setup, made, typical)
    found += _of_gpu(made)
    low, middle, high = grids()
    return [
        *found,
        _assumed("network between devices", made.network_j_per_byte, Standing.UNCONFIRMED),
        Input(
            "parameter server of Cleave",
            "its energy unknown: not counted; nor is making it, in either view of carbon",
            f"{PS_W[0]:g} to {PS_W[1]:g} W, a typical laptop that multiplies", Standing.CHOSEN, "",
        ),
        Input(
            "electricity", f"{middle:.0f} gCO2e/kWh, the median of the world's countries",
            f"{low:.0f} to {high:.0f}; a tenth of the countries is below, a tenth above",
            Standing.PUBLISHED, "Our World in Data and Ember, CC BY 4.0",
        ),
        _assumed("utilisation", made.utilisation, Standing.CHOSEN),
    ]  # fmt: skip


def _of_devices(setup: Setup, made: Assumptions, typical: Typical) -> list[Input]:
    profile, kind = setup.profile, setup.profile.kind
    name, power = kind.value, typical.classes[kind]
    slow, fast = setup.measured_flops_per_s
    median = f"median of {' and '.join(power.devices)}"
    waiting = (
        Input(
            f"power of a waiting {name}",
            f"{power.power.idle_w:g} W",
            f"{power.least.idle_w:g} to {power.most.idle_w:g} W",
            Standing.STAND_IN,
            median,
        )
        if power.power.idle_w is not None
        else Input(
            f"power of a waiting {name}",
            "unknown: left out",
            f"0 to {WAITING_PHONE_W:g} W",
            Standing.UNCONFIRMED,
            "high end: average of a smartphone in use, Boavizta's archetype (0.5 to 3 W)",
        )
    )
    alone, in_training = "end to end", ""
    if setup.trains_slower:
        alone = f"multiplying alone; {EQUAL_SHARE:.0%} of it in training, as of the GPU"
        in_training = "; 25 to 100 % in training"
    typical_made = _kilograms(made.embodied_gco2e[kind])
    made_kg, made_span, sheet = (
        f"{typical_made.value:g} kgCO2e",
        f"{typical_made.low:g} to {typical_made.high:g} kgCO2e",
        typical_made.source,
    )
    years = made.lifetime_years[kind].value
    if profile.embodied:
        made_kg, made_span = f"{profile.embodied.gco2e / 1000:g} kgCO2e", ""
        sheet, years = f"the maker's sheet of {profile.title}", profile.embodied.lifetime_years
    return [
        Input(
            f"speed of a {name}",
            f"{setup.flops_per_s / 1e12:.3g} TFLOP/s when hot ({profile.title}), {alone}",
            f"{slow / 1e12:.2g} to {fast / 1e12:.2g} TFLOP/s{in_training}", Standing.STAND_IN,
            profile.provenance.source,
        ),
        Input(
            f"power of a {name} that multiplies", f"{power.power.compute_w:g} W",
            f"{power.least.compute_w:g} to {power.most.compute_w:g} W", Standing.STAND_IN,
            f"{median}, {_DOING[kind]}; neither is the device of the study",
        ),
        waiting,
        Input(
            f"memory of a {name}",
            " or ".join(f"{o.memory_bytes / 1e9:g} GB ({o.title})" for o in setup.offers), "",
            Standing.CHOSEN, "lent: the 1 to 3 GB of the fleet of arXiv 2512.22142",
        ),
        _assumed(f"charger of a {name}", made.supply_ratio[kind], Standing.UNCONFIRMED),
        Input(
            f"making a {name}", made_kg, made_span, Standing.STAND_IN,
            f"Boavizta, ODbL 1.0: {sheet}",
        ),
        Input(
            f"lifetime of a {name}", f"{years:g} years", "2 to 4 years", Standing.PUBLISHED,
            "Boavizta",
        ),
    ]  # fmt: skip


def _of_gpu(made: Assumptions) -> list[Input]:
    gpu, kind = load_profile(GPU), DeviceKind.CLOUD_GPU
    watts = gpu.power.compute_w if gpu.power and gpu.power.compute_w else 0.0
    bf16 = gpu.compute["bf16"]
    return [
        Input(
            "speed of the A5000",
            f"{bf16.flops_per_s / 1e12:.3g} TFLOP/s multiplying alone; {EQUAL_SHARE:.0%} of it in "
            "training",
            "25 to 100 % in training", Standing.UNCONFIRMED,
            "NVIDIA's datasheet, of which no copy is kept here, scaled by what the A4000 reaches",
        ),
        Input(
            "power of the A5000", f"{watts:g} W, the most that the card may draw",
            f"{GPU_LEAST * watts:.0f} to {watts:.0f} W", Standing.UNCONFIRMED,
            "NVIDIA's datasheet, of which no copy is kept here; low end chosen",
        ),
        Input(
            "memory of the A5000", f"{gpu.memory.installed_bytes / 1e9:g} GB", "",
            Standing.UNCONFIRMED, "NVIDIA's datasheet, of which no copy is kept here",
        ),
        _assumed("around the GPU", made.host_share, Standing.STAND_IN),
        _assumed("PUE of its data centre", made.pue, Standing.PUBLISHED),
        _assumed("making the GPU", _kilograms(made.embodied_gco2e[kind]), Standing.STAND_IN),
        _assumed("lifetime of the GPU", made.lifetime_years[kind], Standing.PUBLISHED),
    ]  # fmt: skip


def _kilograms(figure: Figure) -> Figure:
    thousandths = {name: getattr(figure, name) / 1000 for name in ("value", "low", "high")}
    return replace(figure, **thousandths, unit="kgCO2e")


def _assumed(name: str, figure: Figure, standing: Standing) -> Input:
    span = "" if figure.low == figure.high else f"{figure.low:g} to {figure.high:g}"
    return Input(name, f"{figure.value:g} ({figure.unit})", span, standing, figure.source)


def unconfirmed(found: Sequence[Input]) -> list[Input]:
    """Return the input values whose standing is "not confirmed"."""
    return [each for each in found if each.standing is Standing.UNCONFIRMED]
