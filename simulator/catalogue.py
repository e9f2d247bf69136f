"""Catalogue of the simulated training methods."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from cleave.errors import UsageError
from cleave.planner.tiles.planner import PlanMethod as TileShape
from simulator.alpa import Alpa
from simulator.asteroid import Asteroid
from simulator.cloud import A100, H100, Cloud
from simulator.confidant import Confidant
from simulator.data_parallel import DataParallel
from simulator.dtfm import Dtfm
from simulator.local_updates import LocalUpdates
from simulator.method import Method
from simulator.stages import Stages
from simulator.tiles import Tiles


def methods(utilisation: float = 0.5, *, thorough: bool = False) -> Mapping[str, Method]:
    """Return all training methods by name.

    Args:
        utilisation: share of a cloud GPU's peak FLOP/s that training reaches.
        thorough: True to run all trials of DT-FM's searches, however long they take.
    """
    clouds = [Cloud(gpu, gpus, utilisation) for gpu in (A100, H100) for gpus in (1, 8)]
    return {
        "cleave": Tiles("cleave", TileShape.THREE_D, fused=True),
        "cleave-2d": Tiles("cleave-2d", TileShape.TWO_D, fused=False),
        "cleave-stages": Stages(),
        "diloco": LocalUpdates(),
        "dtfm": Dtfm(thorough=thorough),
        "dtfm-all": Dtfm("dtfm-all", every_device=True, thorough=thorough),
        "alpa": Alpa(),
        "asteroid": Asteroid(),
        "confidant": Confidant(),
        "data-parallel": DataParallel(),
        **{cloud.name: cloud for cloud in clouds},
    }


def chosen(names: str, known: Mapping[str, Method]) -> list[Method]:
    """Return the methods in a comma-separated list, in which `cloud` stands for all cloud methods.

    Raises:
        UsageError: if a name is not in `known`.
    """
    found: dict[str, Method] = {}
    for name in (part.strip() for part in names.split(",")):
        if name == "cloud":
            found |= {key: known[key] for key in known if key.startswith("cloud-")}
        elif name in known:
            found[name] = known[name]
        else:
            near = difflib.get_close_matches(name, known, n=2) or [*known, "cloud"]
            raise UsageError(f"there is no method {name!r}; use {', '.join(near)}")
    return list(found.values())
