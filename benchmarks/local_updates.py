"""Measure the throughput and traffic of local updates (`--method diloco`) in virtual time.

    python -m benchmarks.local_updates [--model opt-125m] [--every 50,200]
                                       [--exchanges bf16,int8,sparse] [--streaming 1:0,4:10]

`--streaming` has the numbers of fragments and of overlapping steps, as in Streaming DiLoCo.

Does rounds with eight laptops behind 20/5 Mbit/s, and results of which only the sizes are computed.
Compares tokens per second with the planner's predictions for the server alone and for exact stages,
and bytes per device and hour with the formula. Bytes are not counted as compressed.

`benchmarks.local_losses` measures what local updates cost in loss.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from typing import Final

import torch

from benchmarks.common import machine
from cleave.arrays import DType
from cleave.planner.coding import CodingPolicy
from cleave.planner.local_updates import ExchangeKind, Rounds
from cleave.planner.plan import PsRates
from cleave.planner.stages.model import PsCompute
from cleave.scheduler.rounds.work import RoundPart
from cleave.training.data.batches import Batch
from cleave.training.diloco.local_updates import LocalUpdates, Round
from cleave.training.diloco.outer import outer_optimizer
from cleave.training.diloco.whole_model import WholeModel
from cleave.training.loop.optimizer import UpdateRule
from cleave.workload.build import load_model, resolve_model
from cleave.workload.registry import find_model
from cleave.workload.stages import StageSizes
from cleave_cli.plan_question import rates_of
from emulator.virtual import emulated
from profiles.fleet_device import FleetDevice
from profiles.fleets import of_profile
from profiles.library import load_profile

_DEVICES: Final = 8
_MBIT: Final = 1e6 / 8
_PS_FLOPS_PER_S: Final = 500e9
_ROWS: Final = 64  # sequences in a step of the exact methods
_TOKENS: Final = 512  # tokens in such a sequence


class SizedUpdates(LocalUpdates):
    """Rounds whose results have sizes but no values, so the weights do not change.

    A sparse change has the largest size: no two devices have returned the same element.
    """

    def _apply(self, parts: Sequence[RoundPart]) -> Round:
        model, kept = self._model, len(parts) / 64
        self._updates = {
            key: model.exchange.update((torch.rand(model.tensors[key].shape) < kept).float())[1]
            for key in self._fragment
        }
        return Round(0.0, sum(part.tokens for part in parts))


def throughput(model_name: str, settings: Sequence[Rounds]) -> None:
    """Print tokens per second, and bytes per device and hour, in virtual time and as predicted."""
    profile = of_profile(load_profile("macbook-air-m1"), "fp32")
    home = {"downlink_bytes_per_s": 20 * _MBIT, "uplink_bytes_per_s": 5 * _MBIT, "latency_s": 0.01}
    home["memory_bytes"] = 4 * 10**9  # a sparse exchange of OPT-125M needs more than the usual 3
    devices = [FleetDevice(**{**profile, **home, "name": f"home-{n}"}) for n in range(_DEVICES)]
    spec = find_model(model_name)
    sizes = StageSizes(spec, _TOKENS, 4, 4)
    ps = PsCompute(_PS_FLOPS_PER_S, 0.0, PsRates())
    rates = rates_of(devices, CodingPolicy.OFF, PsRates())
    forecaster = sizes.forecaster(_ROWS, ps)
    tokens = _ROWS * _TOKENS
    exact = {
        "the server alone, 500 GFLOP/s": forecaster.alone().step_s,
        "exact stages": forecaster.by_stages(rates).step_s,
        "exact stages, state on devices": forecaster.with_state_on_devices(rates).step_s,
    }
    best = max(tokens / step_s for step_s in exact.values())
    print(f"\n{model_name}, {_DEVICES} laptops, 20/5 Mbit/s, {_ROWS} x {_TOKENS} tokens a step")
    print(
        f"{'':<34}{'tokens/s':>10}{'predicted':>11}{'to the best exact':>20}"
        f"{'GB up/device/h':>16}{'formula':>9}{'down':>8}{'formula':>9}"
    )
    for name, step_s in exact.items():
        print(f"{name:<34}{'':>10}{tokens / step_s:>11,.0f}")
    model, _ = load_model(resolve_model(model_name), seed=0)
    ids = torch.zeros(1, _TOKENS, dtype=torch.long)
    batch = Batch(ids, ids)
    for rounds in settings:
        kind, cycles = rounds.exchange, rounds.fragments
        with emulated(devices, compute=False, coding="off") as fleet:
            updates = SizedUpdates(
                whole(model, rounds),
                fleet,
                outer_optimizer(kind, 0.0, 0.9, {}),
                rounds,
                stop=lambda: False,
                note=print,
                presence=lambda presence: None,
            )

            def run(updates: SizedUpdates = updates) -> int:
                return updates.round(
                    lambda step: 1e-3, lambda: [batch] * (_ROWS // _DEVICES)
                ).tokens

            run()  # sends all weights
            began_s, before = fleet.runtime.now(), fleet.counters().traffic
            done = sum(run() for _ in range(cycles))
            took_s, after = fleet.runtime.now() - began_s, fleet.counters().traffic
        per_s, hourly = done / took_s, 3600 / took_s / 1e9
        up = (after.up.total - before.up.total) / _DEVICES * hourly
        down = (after.down.total - before.down.total) / _DEVICES * hourly
        elements = sizes.trained_parameters
        predicted = tokens / forecaster.by_local_updates(rates, elements, rounds).step_s
        name = f"diloco, every {rounds.every}, {kind.value}"
        if rounds.overlap or cycles > 1:
            name += f", {cycles}:{rounds.overlap}"
        print(
            f"{name:<34}{per_s:>10,.0f}{predicted:>11,.0f}{per_s / best:>20.1f}"
            f"{up:>16.3f}{kind.up_bytes * elements * hourly:>9.3f}"
            f"{down:>8.3f}{kind.down_bytes(_DEVICES) * elements * hourly:>9.3f}",
            flush=True,
        )


def whole(model: torch.nn.Module, rounds: Rounds) -> WholeModel:
    """Return a model in the form in which devices train it, one sequence per micro-batch."""
    return WholeModel(
        model, batch=1, seq=_TOKENS, dtype=DType.FP32, rule=UpdateRule(weight_decay=0.1), clip=1.0,
        rounds=rounds, progress=lambda what: None,
    )  # fmt: skip


def parsed_numbers(text: str) -> list[int]:
    """Parse numbers separated by commas."""
    return [int(part) for part in text.split(",")]


def parsed_kinds(text: str) -> list[ExchangeKind]:
    """Parse forms of exchange separated by commas."""
    return [ExchangeKind(part) for part in text.split(",")]


def parsed_streaming(text: str) -> list[tuple[int, int]]:
    """Parse numbers of fragments and of overlapping steps."""
    return [(int(f), int(s)) for f, _, s in (part.partition(":") for part in text.split(","))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="opt-125m")
    parser.add_argument("--every", type=parsed_numbers, default=[50, 200])
    parser.add_argument("--exchanges", type=parsed_kinds, default=list(ExchangeKind)[1:])
    parser.add_argument("--streaming", type=parsed_streaming, default=[(1, 0)])
    options = parser.parse_args()
    print(machine())
    settings = [
        Rounds(every, kind, fragments, overlap)
        for every, kind, (fragments, overlap) in product(
            options.every, options.exchanges, options.streaming
        )
    ]
    throughput(options.model, settings)


if __name__ == "__main__":
    main()
