"""Export of the study's results as a JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from simulator.study.conditions import CARBON_CLAIM, ENERGY_CLAIM
from simulator.study.inputs import Input
from simulator.study.study import Judged, SetupStudy, needed_flops_per_s
from simulator.study.verdicts import Found


def document(found: Sequence[SetupStudy], figures: Sequence[Input]) -> dict[str, Any]:
    """Return the results of the study as nested dictionaries and lists for JSON.

    Args:
        found: results for each set-up.
        figures: input figures of the study.
    """
    return {
        "basis": "modelled",
        "claims": {"energy": list(ENERGY_CLAIM), "carbon": list(CARBON_CLAIM)},
        "setups": [
            {
                "setup": study.setup.name,
                "model": study.setup.model,
                "devices": study.setup.devices,
                "profile": study.setup.profile.name,
                "flops_per_s": study.setup.flops_per_s,
                "batch": study.setup.batch,
                "seq": study.setup.seq,
                "steps": study.setup.steps,
                "gpu": {
                    "profile": study.gpu.profile.name,
                    "duration_s": study.gpu.cloud.time_s,
                    "memory_needed_bytes": study.gpu.needed_bytes,
                    "memory_bytes": study.gpu.installed_bytes,
                    "misfit": study.gpu.misfit,
                },
                "rows": [_row_document(judged) for judged in study.rows],
                "speeds": {
                    method: {
                        "points": [list(point) for point in points],
                        "needed_flops_per_s": needed_flops_per_s(points, ENERGY_CLAIM[0]),
                    }
                    for method, points in study.speeds.items()
                },
                "best": study.best.row.method,
                "one_condition_changed": [asdict(changed) for changed in study.changed],
                "sensitivity": [
                    {
                        "of": dependence.of,
                        "method": dependence.row.method,
                        "ratio": dependence.middle,
                        "bars": [asdict(bar) for bar in dependence.bars],
                    }
                    for dependence in study.dependences
                ],
            }
            for study in found
        ],
        "figures": [{**asdict(each), "standing": each.standing.value} for each in figures],
    }


def _row_document(judged: Judged) -> dict[str, Any]:
    row, found = judged.row, judged.found
    return {
        "method": row.method,
        "memory_bytes": [offer.memory_bytes for offer in row.memory],
        "memory_needed_bytes": row.needed_bytes,
        "fits": row.fits,
        "misfit": row.misfit,
        "devices_used": row.usage.devices,
        "step_s": row.step_s,
        "duration_s": row.duration_s,
        "compute_s": row.usage.compute_s,
        "down_bytes": row.usage.down_bytes,
        "up_bytes": row.usage.up_bytes,
        "network_bytes": row.usage.crossing_bytes,
        "energy_j": found.fleet.energy_j,
        "gpu_energy_j": found.gpu.energy_j,
        "parts": [
            {"name": part.name, "energy_j": part.energy_j, "basis": part.basis.value}
            for part in found.fleet.parts
        ],
        "operational_gco2e": found.fleet.operational_gco2e,
        "embodied_gco2e": found.fleet.embodied_gco2e,
        "ratios": asdict(found.ratios),
        "energy_claim": _found_document(found.energy),
        "attributed_claim": _found_document(found.attributed),
        "sunk_cost_claim": _found_document(found.sunk_cost),
        "compute_over_gpu": found.compute_over_gpu,
    }


def _found_document(found: Found) -> dict[str, Any]:
    return {**asdict(found), "verdict": found.verdict.value}
