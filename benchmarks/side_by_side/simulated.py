"""Compares `simulator/` with measurements of the same set-up, for DDP and pipelines.

Each device has a share of this machine's cores and that share of plain PyTorch's speed on all of
them. If devices share all cores, a waiting device leaves its share to the others, which no
simulation of separate machines does. Then only DDP is compared, whose devices compute at the same
time. Traffic between two devices passes this machine, with the latency of two links. Links faster
than this machine carries packets (`benchmarks.side_by_side.carrying`) are not compared.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.side_by_side.method import Method, Way
from benchmarks.side_by_side.row import Row
from benchmarks.side_by_side.setting import Fault
from benchmarks.side_by_side.shapes import SMOLLM2, SMOLLM2_SPEC
from benchmarks.side_by_side.tables import other
from benchmarks.side_by_side.torch_pipeline import TorchPipeline
from benchmarks.side_by_side.workers.parts import in_line
from cleave.planner.plan import DeviceRates, ElementBytes
from cleave.workload.registry import ModelSpec, find_model
from simulator.data_parallel import DataParallel
from simulator.method import Conditions
from simulator.method import Method as Simulated
from simulator.pipeline import PipelineJob
from simulator.work import train_flops

LIMIT: Final = 0.15
"""Maximum relative difference of a simulated step from the measured one."""

_CARRIED_MBIT: Final = 100.0
"""Rate of a link that this machine can carry during computation, unlike 1000 Mbit/s."""

_MEMORY: Final = 1 << 36  # no limit: processes share this machine's
_BYTES: Final = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Pair:
    """A measured row and its simulation.

    Attributes:
        row: the measured row.
        step_s: simulated seconds of a step.
        of: the simulator's method.
    """

    row: Row
    step_s: float
    of: str

    @property
    def off(self) -> float:
        """Return the relative difference of the simulated step from the measured one."""
        return self.step_s / self.row.step_s - 1

    @property
    def right(self) -> bool:
        """Return whether the difference is within the limit."""
        return abs(self.off) <= LIMIT


def spec_of(model: str) -> ModelSpec:
    """Return a model's sizes by its name."""
    return SMOLLM2_SPEC if model == SMOLLM2 else find_model(model)


def conditions_of(row: Row, plain: Row) -> Conditions:
    """Return a row's setting as conditions of the simulator.

    Args:
        row: the row.
        plain: plain PyTorch's row with the same work and dtype, for the speed of the cores.
    """
    setting, spec = row.setting, spec_of(row.setting.model)
    share = setting.cores / (os.cpu_count() or 1) if setting.cores else 1 / setting.devices
    speed = share * train_flops(spec, setting.batch, setting.seq) / plain.step_s
    devices = [
        DeviceRates(
            number,
            setting.link.down,
            setting.link.up,
            speed,
            latency_s=setting.round_trip_ms / 2000,
            memory_bytes=_MEMORY,
        )
        for number in range(setting.devices)
    ]
    sent = 2 if row.method.variant == "halved" else _BYTES[row.method.dtype]
    return Conditions(spec, setting.batch, setting.seq, devices, ElementBytes(sent, sent))


def simulated(row: Row, rows: Sequence[Row]) -> Pair | None:
    """Return a row with its simulation; None if the simulator does not cover it.

    The simulator covers only whole models without faults.
    """
    setting = row.setting
    calm = setting.fault is Fault.NONE and not setting.rank and row.measured
    if max(setting.link.down_mbit, setting.link.up_mbit) > _CARRIED_MBIT:
        return None
    if row.method.way is Way.PIPELINE and (not setting.cores or row.method.variant in ("", "v")):
        return None  # the simulator has no schedule with two stages per device
    plain = other(row, rows, Method(Way.PLAIN, row.method.dtype))
    if row.method.way not in (Way.DDP, Way.PIPELINE) or not calm or plain is None:
        return None
    conditions = conditions_of(row, plain)
    method: Simulated = DataParallel(every_device=True)
    if row.method.way is Way.PIPELINE:
        head_layers = PipelineJob.of(conditions).head_layers
        stages = in_line(conditions.spec.layers, head_layers, setting.devices)
        method = TorchPipeline([len(layers) for layers in stages])
    outcome = method.outcomes(conditions)[0]
    return Pair(row, outcome.step_s, f"{outcome.method}, {outcome.setting}")


def pairs(rows: Sequence[Row]) -> list[Pair]:
    """Return all rows that the simulator covers, with their simulations."""
    found = (simulated(row, rows) for row in rows)
    return [pair for pair in found if pair is not None]


def main() -> None:
    """Print simulated and measured steps of a file of rows."""
    import sys

    from benchmarks.side_by_side.results import Results
    from benchmarks.side_by_side.tables import named

    found = pairs(Results(Path(sys.argv[1])).rows)
    for pair in found:
        print(
            f"{named(pair.row.key)}: {pair.row.step_s:.2f} s measured, {pair.step_s:.2f} s "
            f"simulated ({pair.off:+.0%}; {pair.of})"
        )
    right = all(pair.right for pair in found)
    print(f"within {LIMIT:.0%} of what was measured: {'yes' if right else 'NO'}")
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
