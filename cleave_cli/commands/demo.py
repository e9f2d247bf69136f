"""`cleave demo`: show in a minute that losing a device does not change the training loss."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer import Option

from cleave.errors import CleaveError
from cleave_cli.options import Json, human_bytes, need_train_extra, writes
from cleave_cli.own_server import own_devices

if TYPE_CHECKING:
    from cleave.fleet.fleet import Fleet
    from cleave.training.loop.records import StepRecord

_DEVICES: Final = 4
_STEPS: Final = 10
_KILLED_AFTER: Final = 4  # number of the step after which a device is killed
_MODEL: Final = "opt-tiny"
_BATCH, _SEQUENCE = 4, 32
_REAL_MODEL: Final = "opt-1.3b"
_REAL_BATCH, _REAL_SEQUENCE = 64, 512
_HOUSEHOLD: Final = "household"
_CARD_GBIT: Final = 1
# Relative. AdamW's first steps amplify rounding: ten steps differ by up to 8e-5.
_LARGEST_DIFFERENCE: Final = 2e-4


def demo(
    runs: Annotated[Path, Option(help="Folder for run folders.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """Train a small model here and on four devices, kill one device, and compare the losses.

    The devices are processes on this machine that join a server over loopback. Then a step of a
    large model is simulated on nine devices of a household, at the speeds in their profiles.

    Examples:

      cleave demo
    """
    need_train_extra("cleave demo")

    def say(text: str = "") -> None:
        if not as_json:
            typer.echo(text)

    began_s = time.perf_counter()
    say(
        f"1. {_MODEL} is trained by plain PyTorch on this machine, then by {_DEVICES} devices\n"
        f"   (real processes) that multiply for a parameter server."
    )
    small = _small(runs, say)
    say()
    say(
        f"2. A step of {_REAL_MODEL}, {_REAL_BATCH} x {_REAL_SEQUENCE} tokens, on nine phones and "
        f"laptops of a\n   household's Wi-Fi, which hold whole layers. Simulated."
    )
    large = _large()
    say(
        f"   this machine alone  {large['simulated_alone_s']:8,.0f} s  (predicted, from "
        f"{large['flops_per_s'] / 1e9:.3g} GFLOP/s, measured here)"
    )
    say(f"   the household       {large['simulated_step_s']:8,.0f} s  (simulated)")
    if large["measured_under_load"]:
        say(
            f"   This machine's speed was measured {large['measured_under_load']}.\n"
            f"   An idle machine is faster. Then compare again, with the last command below."
        )
    took_s = time.perf_counter() - began_s
    if as_json:
        typer.echo(json.dumps({"small": small, "large": large, "seconds": took_s}))
    else:
        say()
        say(_summary(small, large, took_s))
    if not small["equal"]:
        raise CleaveError(
            f"losses of the fleet are off by {small['largest_difference']:.1e}; please report it"
        )


# --- real training of a small model ---


def _small(runs: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Train a small model on this machine and on devices; return the losses and the traffic."""
    import cleave

    alone: list[StepRecord] = []
    say("   First on this machine, then the devices start ...")
    _train(runs, "local", None, alone.append)
    plain = [record.loss for record in alone]
    say("   step   this machine      devices   difference      time")
    found: list[StepRecord] = []
    options = ("--backend", "numpy", "--threads", "1")  # the backend that starts fastest
    with cleave.serve() as server, own_devices(server.url, _DEVICES, *options) as processes:
        for process in processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise CleaveError("a device process ended before it had joined")
        server.fleet.wait_for(_DEVICES)

        def report(record: StepRecord) -> None:
            found.append(record)
            loss = plain[record.step - 1]
            say(
                f"   {record.step:4}   {loss:12.5f} {record.loss:12.5f}   "
                f"{abs(record.loss - loss):10.1e} {record.wall_s:7.2f} s"
            )
            if record.step == _KILLED_AFTER:
                processes[0].kill()
                say(
                    f"          a device is killed; {_DEVICES - 1} continue with its part, and may "
                    f"be slower"
                )

        folder = _train(runs, "tiles", server.fleet, report)
        left = server.fleet.device_count
    losses = [record.loss for record in found]
    off = [abs(one - other) / other for one, other in zip(losses, plain, strict=True)]
    plot = folder / "losses.png"
    with writes(plot):
        _draw_losses(plot, plain, losses, _DEVICES, _KILLED_AFTER)
    return {
        "model": _MODEL,
        "devices": _DEVICES,
        "devices_left": left,
        "losses": losses,
        "plain_losses": plain,
        "largest_difference": max(off),
        "equal": max(off) <= _LARGEST_DIFFERENCE,
        "downlink_bytes": sum(record.downlink_bytes for record in found),
        "uplink_bytes": sum(record.uplink_bytes for record in found),
        "seconds": sum(record.wall_s for record in found),
        "alone_seconds": sum(record.wall_s for record in alone),
        "run_folder": str(folder),
        "plot": str(plot),
    }


def _draw_losses(
    path: Path, alone: Sequence[float], together: Sequence[float], devices: int, killed_after: int
) -> None:
    """Plot the losses of both runs by step, and when a device was killed."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from cleave.files import save_figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    steps = range(1, len(alone) + 1)
    # The wide line stays visible below the narrow one.
    axes.plot(steps, alone, color="#f0b27a", linewidth=9, label="this machine alone, plain PyTorch")
    axes.plot(
        steps, together, color="#1f4e79", linewidth=1.5, marker="o", markersize=4,
        label=f"{devices} devices, one of which is killed",
    )  # fmt: skip
    axes.axvline(killed_after + 0.5, color="#b03a2e", linestyle="--", linewidth=1.2)
    axes.annotate(
        f" a device is killed;\n the other {devices - 1} do its work",
        (killed_after + 0.5, max(alone)), color="#b03a2e", va="top",
    )  # fmt: skip
    off = max(abs(one - other) / other for one, other in zip(together, alone, strict=True))
    axes.set(
        title=f"The same losses on one machine and on devices (at most {100 * off:.2g} % apart)",
        xlabel="step",
        ylabel="loss (nats per token)",
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="lower left")
    save_figure(figure, path, 120)


def _train(
    runs: Path, method: str, fleet: Fleet | None, report: Callable[[StepRecord], None]
) -> Path:
    """Train the small model by `method` on `fleet` (None: here alone); return the run folder."""
    from cleave.training.loop.context import TrainContext
    from cleave.training.loop.job import JobSpec
    from cleave.training.loop.records import Record, StepRecord
    from cleave.training.loop.run_folder import RunFolder
    from cleave.training.loop.start import train

    def told(record: Record) -> None:
        if isinstance(record, StepRecord):
            report(record)

    job = JobSpec(
        _MODEL, steps=_STEPS, batch=_BATCH, seq=_SEQUENCE, method=method, checkpoint_every=0
    )
    folder = RunFolder.create(runs.absolute())
    train(job, folder, TrainContext(fleet, told))
    return folder.path


# --- emulation of a large model ---


def _large() -> dict[str, Any]:
    """Emulate a step of a large model on a household's devices; return its time and traffic."""
    from cleave.arrays import DType
    from cleave.machine.load import OtherLoad
    from cleave.planner.plan import PsRates
    from cleave.workload.registry import find_model
    from cleave.workload.stages import StageSizes
    from cleave_cli.plan_question import server_of
    from emulator.sized_stages import emulate_stages
    from profiles.fleets import find_fleet

    card = _CARD_GBIT * 1e9 / 8
    spec, others, dtype = find_model(_REAL_MODEL), OtherLoad(), DType.FP32
    ps = server_of(StageSizes(spec, _REAL_SEQUENCE), 0.0, dtype.value, PsRates(card, card))
    under_load = others.remark()
    household = find_fleet(_HOUSEHOLD, seed=42)
    found = emulate_stages(spec, _REAL_BATCH, _REAL_SEQUENCE, household, ps, dtype=dtype)
    return {
        "model": _REAL_MODEL,
        "fleet": _HOUSEHOLD,
        "simulated_step_s": found.step_s,
        "simulated_alone_s": found.alone_s,
        "flops_per_s": ps.flops_per_s,
        "measured_under_load": under_load,
        "downlink_bytes": found.steps[-1].downlink_bytes,
        "uplink_bytes": found.steps[-1].uplink_bytes,
    }


# --- output ---


def _summary(small: Mapping[str, Any], large: Mapping[str, Any], took_s: float) -> str:
    faster = large["simulated_alone_s"] / large["simulated_step_s"]
    both = zip(small["losses"], small["plain_losses"], strict=True)
    off, steps, devices = max(abs(a - b) for a, b in both), len(small["losses"]), small["devices"]
    load = " (whose speed was measured under load)" if large["measured_under_load"] else ""
    slower = small["seconds"] > small["alone_seconds"]
    verdict = " (devices do not pay for so small a model)" if slower else ""
    down, up = human_bytes(small["downlink_bytes"]), human_bytes(small["uplink_bytes"])
    return f"""\
What this shows
   exact      the losses equal those of plain PyTorch up to rounding: they differ by at
              most {off:.1e}, although one of {devices} devices was killed
   real       the devices took {small["seconds"]:.1f} s for {steps} steps, and this machine alone
              {small["alone_seconds"]:.1f} s{verdict}; the devices
              received {down} and sent {up}
   simulated  {large["model"]} on a household: {faster:.0f} times as fast as this machine
              alone{load}
   plot       {_seen_from_here(Path(small["plot"]))}
              shows both curves, and when the device was killed
   duration   {took_s:.0f} s

Next
   cleave serve --host 0.0.0.0
       a server: scan its code to add your phone, and watch it with
       `cleave dashboard`. First, in this terminal: . .venv/bin/activate
   cleave train --model opt-125m
       a real model, on emulated devices or, with --server @FILE, on yours
   cleave plan --model {large["model"]} --batch {_REAL_BATCH} --seq {_REAL_SEQUENCE} \\
       --fleet {large["fleet"]} --ps-gbit {_CARD_GBIT}
       whether a fleet is faster than this machine; here with the settings of 2."""


def _seen_from_here(path: Path) -> Path:
    """Return `path` relative to the working directory, or unchanged if it is outside."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
