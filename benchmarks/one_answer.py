"""What a step takes by `cleave plan`, `simulate` and `emulate`, and why they differ.

    python -m benchmarks.one_answer [--only 1,2,...] [--json]

Set-ups 7 and 8 are the rows of `cleave simulate paper` in which a claim on times holds by stages.
For each set-up the three commands are run as a user runs them, in bf16, without coding and with the
same speed of the server. `emulate` and `simulate` count some things otherwise than `plan`. What
each of them makes is computed by itself, by the planner or an emulation, and added to the plan:

    attention   simulated on devices, where training computes it on the server
    siblings    simulated: q, k and v as one multiplication, and gate and up; training has them
                apart
    apart       simulated one multiplication after another; training submits both gradients of a
                Linear together
    loop        simulated as if messages cost the server nothing, so that strips are thin
    held        emulated: in fleets of up to 64 devices plans follow what devices hold of other
                multiplications, as weights and gradients; predictions of a step do not
    optimizer   emulated by stages: the server's, which plans leave out

`left` is by how much a command's answer differs from the plan with that. Exit code 1 if it is more
than 3 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from typer.testing import CliRunner

from benchmarks.stage_fleets import card_of
from cleave.arrays import DType
from cleave.planner.coding import CodingPolicy, payload_rates
from cleave.planner.cost import PS_BLOCK_S, PS_BYTE_S
from cleave.planner.plan import ElementBytes, PsRates
from cleave.planner.planner import TilePlanner
from cleave.planner.report import StepReport, plan_step
from cleave.workload.registry import find_model
from cleave.workload.step import step_gemms
from cleave_cli.main import app
from cleave_cli.weighing import fleet_devices, rates_of
from emulator.sized_step import SizedStepper, server_s
from emulator.virtual import emulated
from tests.planner.afresh import Afresh

LEFT: Final = 0.03
_BF16: Final = ElementBytes(2, 2)


@dataclass(frozen=True)
class Setup:
    """What is trained where.

    Attributes:
        model, rows, sequence: the model and the batch.
        fleet, devices: name of the fleet without its size, and the size.
        method: tiles or stages.
        gbit: the server's card, each way; 0 for no limit.
        memory_gb: of each device; 0 for what the fleet's have.
        gflops: of the server. Where it is fast it keeps multiplications to itself, in plans.
    """

    model: str
    rows: int
    sequence: int
    fleet: str
    devices: int
    method: str
    gbit: float
    gflops: float = 500
    memory_gb: float = 0

    @property
    def title(self) -> str:
        """Return the set-up in words."""
        card = f"{self.gbit:g} Gbit/s" if self.gbit else "no card"
        batch, memory = f"{self.rows}x{self.sequence}", f" of {self.memory_gb:g} GB"
        fleet = f"{self.fleet}-{self.devices}{memory if self.memory_gb else ''}"
        return f"{self.model} {batch}, {fleet}, {self.method}, {card}"

    @property
    def card(self) -> PsRates:
        """Return the server's card."""
        return card_of(self.gbit)

    @property
    def spared(self) -> PsRates:
        """Return the server as its own plans see it."""
        return replace(self.card, block_s=PS_BLOCK_S, byte_s=PS_BYTE_S)


SETUPS: Final = (
    Setup("opt-125m", 64, 512, "paper", 32, "tiles", 0, gflops=100),
    Setup("opt-1.3b", 64, 512, "paper", 256, "tiles", 10),
    Setup("opt-13b", 128, 1024, "paper", 1024, "tiles", 0),
    Setup("opt-125m", 16, 512, "household", 9, "tiles", 1, gflops=20),
    Setup("opt-125m", 64, 512, "household", 9, "stages", 1),
    Setup("opt-1.3b", 64, 512, "paper", 256, "stages", 10),
    Setup("opt-1.3b", 128, 1024, "paper", 256, "stages", 0),
    Setup("opt-13b", 128, 1024, "paper", 256, "stages", 0, memory_gb=32),
)


@dataclass(frozen=True)
class Answer:
    """What the three commands say of a set-up, in seconds.

    Attributes:
        plan_s, simulate_s, emulate_s: as they say it.
        simulated, emulated: what a simulation, or an emulation, counts otherwise than the plan.
    """

    plan_s: float
    simulate_s: float
    emulate_s: float
    simulated: Mapping[str, float]
    emulated: Mapping[str, float]

    @property
    def left(self) -> tuple[float, float]:
        """Return what is not explained, of a simulation and of an emulation, as shares."""
        return (
            self.simulate_s / (self.plan_s + sum(self.simulated.values())) - 1,
            self.emulate_s / (self.plan_s + sum(self.emulated.values())) - 1,
        )


def said_by(*command: str) -> list[dict[str, Any]]:
    """Return the JSON documents that a command prints, one a line.

    Raises:
        RuntimeError: when it fails.
    """
    ran = CliRunner().invoke(app, [*command, "--json"])
    if ran.exit_code:
        raise RuntimeError(f"cleave {' '.join(command)}: {ran.output}")
    return [json.loads(line) for line in ran.stdout.splitlines()]


def with_memory(setup: Setup, folder: Path) -> str:
    """Write a fleet file of a set-up's devices, but with its memory, and return its name."""
    lines = []
    for device in fleet_devices(f"{setup.fleet}-{setup.devices}", 0.0, "bf16"):
        lines += [
            "[[group]]",
            "count = 1",
            f"flops_per_s = {device.stated_flops_per_s!r}",
            f"downlink_bytes_per_s = {device.stated_downlink_bytes_per_s!r}",
            f"uplink_bytes_per_s = {device.stated_uplink_bytes_per_s!r}",
            f"memory_bytes = {round(setup.memory_gb * 1e9)}",
        ]
    file = folder / "fleet.toml"
    file.write_text("\n".join(lines), encoding="utf-8")
    return str(file)


def answer_of(setup: Setup) -> Answer:
    """Ask the three commands about a set-up."""
    if not setup.memory_gb:
        return answer_on(f"{setup.fleet}-{setup.devices}", setup.fleet, setup)
    with TemporaryDirectory() as folder:
        file = with_memory(setup, Path(folder))
        return answer_on(file, file, setup)


def answer_on(fleet: str, without_size: str, setup: Setup) -> Answer:
    """Ask the three commands about a set-up on this fleet: its name with its size, and without."""
    common = (
        *("--model", setup.model, "--batch", str(setup.rows), "--seq", str(setup.sequence)),
        *("--ps-gbit", str(setup.gbit), "--ps-gflops", str(setup.gflops)),
        *("--dtype", "bf16", "--coding", "off"),
    )
    exactly = ("--fleet", fleet, "--method", setup.method)
    stages = setup.method == "stages"
    (planned,) = said_by("plan", *common, *exactly)
    plan_s = next(e["step_s"] for e in planned["methods"] if e["method"] == setup.method)
    (simulated,) = said_by(
        "simulate", *common, "--fleet", without_size, "--devices", str(setup.devices),
        "--methods", "cleave-stages" if stages else "cleave",
    )  # fmt: skip
    row = simulated["rows"][0]
    last = said_by("emulate", *common, *exactly, "--steps", "2" if stages else "1")[-1]
    if stages:
        emulate_s = last["fleet_s"] + last["optimizer_s"]
        return Answer(plan_s, row["step_s"], emulate_s, {}, {"optimizer": last["optimizer_s"]})
    emulate_s = last["fleet_s"] + last["server_s"]
    attention_s = row["parts_s"]["attention"]
    held_s = last["fleet_s"] - nothing_held_s(setup)
    simulated_otherwise = counted_otherwise(setup, attention_s)
    return Answer(plan_s, row["step_s"], emulate_s, simulated_otherwise, {"held": held_s})


def nothing_held_s(setup: Setup) -> float:
    """Return the virtual seconds of a step by tiles if no plan follows what devices hold."""
    members = fleet_devices(f"{setup.fleet}-{setup.devices}", 0.0, "bf16")
    with emulated(members, compute=False, ps=setup.card, coding="off") as fleet:
        fleet.planner = Afresh(TilePlanner(setup.spared))
        tokens = setup.rows * setup.sequence
        return SizedStepper(fleet, find_model(setup.model), tokens, DType.BF16).step().fleet_s


def counted_otherwise(setup: Setup, attention_s: float) -> dict[str, float]:
    """Return what a simulation by tiles counts otherwise than a plan, in seconds.

    Args:
        setup: what is trained where.
        attention_s: of attention on devices.
    """
    spec, card = find_model(setup.model), setup.card
    members = fleet_devices(f"{setup.fleet}-{setup.devices}", 0.0, "bf16")
    rates = payload_rates(rates_of(members, CodingPolicy.OFF, card), "bf16")

    def step(planner: TilePlanner, *, fused: bool) -> StepReport:
        gemms = step_gemms(spec, setup.rows, setup.sequence, fused)
        return plan_step(planner, gemms, _BF16, rates, card)

    trained = TilePlanner(setup.spared)
    fused = step(trained, fused=True)
    here_s = server_s(spec, setup.rows, setup.sequence, setup.gflops * 1e9)
    return {
        "attention": attention_s - here_s,
        "siblings": fused.predicted_s - step(trained, fused=False).predicted_s,
        "apart": fused.apart_s - fused.predicted_s,
        "loop": step(TilePlanner(card), fused=True).apart_s - fused.apart_s,
    }


def main() -> None:
    """Print a table of all set-ups."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="numbers of set-ups, from 1")
    parser.add_argument("--json", action="store_true", help="a JSON line for each set-up")
    given = parser.parse_args()
    numbers = [int(each) for each in given.only.split(",") if each]
    good = True
    if not given.json:
        print(f"{'seconds of a step':28}{'plan':>13}{'simulate':>13}{'emulate':>13}")
    for number, setup in enumerate(SETUPS, 1):
        if numbers and number not in numbers:
            continue
        answer = answer_of(setup)
        good &= max(map(abs, answer.left)) <= LEFT
        if given.json:
            print(json.dumps(asdict(setup) | asdict(answer) | {"left": answer.left}), flush=True)
        else:
            print(shown(number, setup, answer), flush=True)
    sys.exit(not good)


def shown(number: int, setup: Setup, answer: Answer) -> str:
    """Return the lines of a set-up."""
    lines = [f"{number}. {setup.title}"]
    said = (answer.plan_s, answer.simulate_s, answer.emulate_s)
    lines.append(f"{'':28}" + "".join(f"{seconds:13.2f}" for seconds in said))
    for name in (*answer.simulated, *answer.emulated):
        cells = [
            f"{counts[name]:+13.2f}" if name in counts else f"{'':13}"
            for counts in (answer.simulated, answer.emulated)
        ]
        lines.append(f"   {name:25}{'':13}{''.join(cells)}".rstrip())
    simulated, emulated = answer.left
    lines.append(f"   {'left':25}{'':13}{simulated:+13.1%}{emulated:+13.1%}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
