"""Setup of a job that may train by stages."""

from __future__ import annotations

from collections.abc import Callable, Set
from contextlib import AbstractContextManager

from torch import nn

from cleave.arrays import DType
from cleave.fleet.fleet import Fleet
from cleave.fleet.local_fallback import FleetPresence
from cleave.graphs.errors import LayerGraphError
from cleave.graphs.graph_cache import GraphCache
from cleave.graphs.model_graphs import model_graphs
from cleave.graphs.packed import packed_by
from cleave.planner.plan import Method
from cleave.planner.stages.model import PsCompute, pieces_of_sequence
from cleave.planner.stages.search import plan_stages
from cleave.training.loop.job import FallbackMode, JobSpec, Packing
from cleave.training.loop.methods import TilesForecaster
from cleave.training.stages.audits import Auditor
from cleave.training.stages.ps_passes import described_refusals
from cleave.training.stages.stage_work import ModelWork
from cleave.training.stages.staged import StagedModel


def staged_model(
    job: JobSpec,
    model: nn.Module,
    fleet: Fleet,
    ps: PsCompute,
    tiles: TilesForecaster,
    *,
    stop: Callable[[], bool],
    note: Callable[[str], None],
    presence: Callable[[FleetPresence], None],
    own_products: Callable[[Set[int]], AbstractContextManager[None]],
) -> StagedModel | None:
    """Make the graphs of a model's layers, and the object that trains it by stages.

    Args:
        job: job with `--method stages` or `auto`.
        model: the model, as made by transformers.
        fleet: the fleet that trains the model.
        ps: speed of the PS.
        tiles: forecasts a step by tiles, for comparison with `auto`.
        stop, note, presence, own_products: see `StagedModel`.

    Returns:
        The staged model; None with `--method auto` if no layer can become a graph.

    Raises:
        LayerGraphError: with `--method stages`, when no layer can become a graph.
    """
    auto = job.method == Method.AUTO.value
    packed = packed_by(model) if job.packing == Packing.SEPARATE.value else None
    cache = GraphCache.of_user()

    def making(what: str) -> None:
        note(f"making {what}")

    try:
        graphs = model_graphs(model.train(), job.seq, cache, packed=packed, progress=making)
    except LayerGraphError as error:
        if not auto:
            raise
        note(f"no stages: {error}")
        return None
    if said := described_refusals(graphs):
        note(said)
    dtype = DType(job.dtype)
    local = job.fallback == FallbackMode.LOCAL.value

    def in_parts() -> ModelWork:
        made = model_graphs(
            model,
            job.seq,
            cache,
            packed=packed,
            in_parts=True,
            pieces=pieces_of_sequence(job.seq),
            progress=making,
        )
        return ModelWork(model, made, dtype)

    return StagedModel(
        ModelWork(model, graphs, dtype),
        fleet.runtime,
        plan_stages,
        ps,
        tiles=tiles if auto else None,
        auditor=Auditor(job.audit),
        in_parts=in_parts,
        local_after_s=job.fallback_after_s if local else None,
        stop=stop,
        note=note,
        presence=presence,
        own_products=own_products,
    )
