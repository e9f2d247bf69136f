"""`cleave footprint`: the energy and carbon footprint of a run or of a planned run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from cleave.errors import UsageError
from cleave.training.loop.job import DEFAULT_BATCH, DEFAULT_SEQ
from cleave_cli.options import Json, usage_errors
from cleave_cli.render.text import Csv, form_of

if TYPE_CHECKING:
    from cleave.energy.account import CloudUsage, Ps
    from cleave.energy.comparison import ComparisonQuestion
    from cleave.energy.grid import Electricity
    from cleave.energy.predict import Work
    from cleave.energy.run_energy import RunEnergy
    from cleave.energy.typical import Assumptions
    from profiles.device_profile import DeviceProfile


_KWH_PER_GB = 3.6e6 / 1e9  # J/byte
_IN_ALL = "time, with loading and saving"
_AS_ASSUMED = -1.0  # default of options for which 0 is a valid value


def footprint(
    run: Annotated[Path | None, Argument(help="Folder of a run.", show_default=False)] = None,
    model: Annotated[str, Option(help="Instead of a run: model, such as opt-1.3b.")] = "",
    fleet: Annotated[
        str, Option(help="With --model: fleet, such as laptops-4, home-mix-N or a TOML file.")
    ] = "laptops-4",
    against: Annotated[
        str, Option(help="With --model: profile of a data centre's GPU, such as a5000.")
    ] = "",
    steps: Annotated[int, Option(help="With --model: optimizer steps.")] = 100,
    batch: Annotated[int, Option(help="With --model: sequences per step.")] = DEFAULT_BATCH,
    seq: Annotated[int, Option(help="With --model: tokens per sequence.")] = DEFAULT_SEQ,
    dtype: Annotated[str, Option(help="With --model: dtype (bf16, fp16 or fp32).")] = "bf16",
    grid: Annotated[
        str,
        Option(help="Electricity, for carbon: a country such as DEU, or a CSV of hourly values."),
    ] = "",
    cloud_grid: Annotated[
        str, Option(help="Electricity of the data centre; default: --grid.")
    ] = "",
    start_hour: Annotated[
        float, Option(help="Hour of the day at the start, for a CSV of hourly values.")
    ] = 0.0,
    lifetime: Annotated[
        float,
        Option(help="Lifetime of devices and GPU in years; 0 uses the default for each kind."),
    ] = 0.0,
    utilisation: Annotated[
        float, Option(help="Share of its lifetime that a device is in use; 0 uses the default.")
    ] = 0.0,
    charger: Annotated[
        float,
        Option(
            help="Ratio of energy at the socket to energy used; 0 uses the default for each kind."
        ),
    ] = 0.0,
    network: Annotated[
        float, Option(help="kWh per GB of traffic; -1 uses the default.")
    ] = _AS_ASSUMED,
    ps_watts: Annotated[
        float, Option(help="Power of the PS at the socket in watts; 0 means unknown.")
    ] = 0.0,
    pue: Annotated[
        float, Option(help="PUE of the data centre, 1 or more; 0 uses the default.")
    ] = 0.0,
    host_share: Annotated[
        float,
        Option(help="Ratio of the energy of the GPU's host to the GPU's; -1 uses the default."),
    ] = _AS_ASSUMED,
    gpu_share: Annotated[
        float, Option(help="Share of the GPU's multiplications/s that training reaches.")
    ] = 0.5,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Report the energy and carbon of a run, or of a planned run compared with a data centre.

    Examples:

      cleave footprint runs/20261121-101500 --grid DEU

      cleave footprint --model opt-1.3b --fleet laptops-4 --against a5000 --grid USA

      cleave footprint --model opt-125m --fleet phones-5g-15 --charger 2.9 --json
    """
    from cleave.energy.comparison import Case, ComparisonQuestion
    from cleave.energy.typical import load_typical
    from cleave_cli.render.footprint import Shown, show
    from profiles.library import load_profiles

    if (run is None) == (not model):
        raise UsageError(
            "pass either a run folder or --model, as in: cleave footprint --model opt-1.3b"
        )
    if run is not None and against:
        raise UsageError(
            "--against needs --model and --fleet, because it compares a planned run, not a "
            "finished one"
        )
    form = form_of(as_json=as_json, as_csv=as_csv)
    made = _assumed(lifetime, utilisation, charger, network, pue, host_share)
    profiles, typical = load_profiles(), load_typical()
    cloud: CloudUsage | None = None
    notes: list[str] = []
    of, time_is = "fleet", "time"
    if run is not None:
        question, energy = _of_run(run, profiles, ps_watts, notes)
        duration_s, title = energy.duration_s, f"run {run.name or run}"
        if not energy.usages:
            of, title = "this machine", f"{title}, without devices"
        time_is = "time on the devices' clock" if energy.virtual and energy.usages else _IN_ALL
    else:
        from cleave.energy.predict import cloud_usage, fleet_usages
        from profiles.fleets import find_fleet

        work = _work(model, batch, seq, steps, dtype)
        with usage_errors():
            members = find_fleet(fleet, dtype=dtype)
        usages, duration_s = fleet_usages(work, members)
        if against:
            profile = _gpu(against)
            if not 0 < gpu_share <= 1:
                raise UsageError(
                    f"--gpu-share must be more than 0 and at most 1, not {gpu_share:g}"
                )
            cloud = cloud_usage(work, profile, gpu_share)
        question = ComparisonQuestion(usages, profiles, typical, _ps(ps_watts, duration_s), cloud)
        title = f"{model}, {steps} steps of {batch} x {seq} tokens, {dtype}, {fleet}"
        notes += _on_work(work, cloud, gpu_share)
    here = _electricity(grid, start_hour, duration_s)
    there = _electricity(cloud_grid or grid, start_hour, cloud.time_s if cloud else 0.0)
    case = Case(made, here.gco2e_per_kwh if here else None, there.gco2e_per_kwh if there else None)
    notes += [f"electricity of {at.text}" for at in dict.fromkeys((here, there)) if at]
    shown = Shown(title, duration_s, question, case, tuple(notes), of, time_is)
    show(shown, form)


def _of_run(
    path: Path, profiles: dict[str, DeviceProfile], ps_watts: float, notes: list[str]
) -> tuple[ComparisonQuestion, RunEnergy]:
    from cleave.energy.comparison import ComparisonQuestion
    from cleave.energy.run_energy import run_energy
    from cleave.energy.typical import load_typical
    from cleave.training.loop.run_folder import RunFolder

    folder = RunFolder(path)
    folder.read_config()  # raises if the folder is not a run folder
    energy: RunEnergy = run_energy(folder.records())
    ps = _ps(ps_watts, energy.duration_s) or energy.ps
    notes += energy.notes()
    question = ComparisonQuestion(energy.usages, profiles, load_typical(), ps)
    return question, energy


def _work(model: str, batch: int, seq: int, steps: int, dtype: str) -> Work:
    from cleave.energy.predict import Work
    from cleave.workload.registry import find_model

    if dtype not in ("bf16", "fp16", "fp32"):
        raise UsageError(f"--dtype is {dtype!r}; use bf16, fp16 or fp32")
    if steps < 1:
        raise UsageError(f"--steps must be 1 or more, not {steps}")
    return Work(find_model(model), batch, seq, steps, dtype)


def _on_work(work: Work, cloud: CloudUsage | None, gpu_share: float) -> list[str]:
    from cleave.energy.predict import TRAINING_BYTES_PER_PARAMETER, fits

    notes = [
        "both sides include the multiplications of Linear layers, but not attention scores, the "
        "optimizer or other work of the PS",
        "phones multiply at their sustained speed, when hot",
    ]
    if cloud is not None:
        notes.append(
            f"{cloud.profile.title} reaches {gpu_share:.0%} of its throughput in multiplication"
        )
        gigabytes = TRAINING_BYTES_PER_PARAMETER * work.spec.parameters / 1e9
        installed = (cloud.profile.memory.installed_bytes or cloud.profile.memory.bytes) / 1e9
        verdict = "below" if fits(work, cloud.profile) else "which does not fit in"
        notes.append(
            f"memory: {TRAINING_BYTES_PER_PARAMETER} bytes per parameter are {gigabytes:.3g} GB, "
            f"{verdict} its {installed:g} GB; activations need additional memory"
        )
    return notes


def _gpu(name: str) -> DeviceProfile:
    from profiles.library import load_profile

    with usage_errors():
        profile = load_profile(name)
    if profile.power is None or profile.power.compute_w is None:
        raise UsageError(
            f"the power of {name} is unknown, and so is its energy; use a profile with compute_w, "
            "such as a5000 or a100-sxm-80gb"
        )
    return profile


def _ps(watts: float, seconds: float) -> Ps | None:
    from cleave.energy.account import Ps
    from cleave.energy.meter import Basis

    _check("--ps-watts", watts, 0.0, "a number of watts, or 0 if unknown")
    return Ps(watts * seconds, Basis.MODELLED) if watts else None


def _electricity(place: str, start_hour: float, duration_s: float) -> Electricity | None:
    from cleave.energy.grid import electricity

    if not 0 <= start_hour <= 24:
        raise UsageError(
            f"--start-hour must be an hour of the day, from 0 to 24, not {start_hour:g}"
        )
    return electricity(place, start_hour, duration_s) if place else None


def _check(name: str, value: float, least: float, wanted: str) -> None:
    if not least <= value < math.inf:  # also raises for NaN
        raise UsageError(f"{name} must be {wanted}, not {value:g}")


def _assumed(
    lifetime: float,
    utilisation: float,
    charger: float,
    network: float,
    pue: float,
    host_share: float,
) -> Assumptions:
    from cleave.energy.typical import load_assumptions

    made = load_assumptions()
    _check("--lifetime", lifetime, 0.0, "a number of years, or 0 for the default")
    if not 0 <= utilisation <= 1:
        raise UsageError(
            f"--utilisation must be between 0 (for the default) and 1, not {utilisation:g}"
        )
    for name, ratio in (("--charger", charger), ("--pue", pue)):
        if ratio:
            _check(name, ratio, 1.0, "1 or more, or 0 for the default")
    for name, figure_or_not in (("--network", network), ("--host-share", host_share)):
        if figure_or_not != _AS_ASSUMED:
            _check(name, figure_or_not, 0.0, "0 or more, or -1 for the default")
    if lifetime:
        made = replace(made, one_lifetime_years=lifetime)
    if utilisation:
        made = replace(made, utilisation=replace(made.utilisation, value=utilisation))
    if charger:
        supply = {k: replace(f, value=charger) for k, f in made.supply_ratio.items()}
        made = replace(made, supply_ratio=supply)
    if network != _AS_ASSUMED:
        figure = replace(made.network_j_per_byte, value=network * _KWH_PER_GB)
        made = replace(made, network_j_per_byte=figure)
    if pue:
        made = replace(made, pue=replace(made.pue, value=pue))
    if host_share != _AS_ASSUMED:
        made = replace(made, host_share=replace(made.host_share, value=host_share))
    return made
