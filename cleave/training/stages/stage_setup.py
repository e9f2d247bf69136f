"""Set up a training job whose method is `stages` or `auto`."""

from __future__ import annotations

from collections.abc import Callable, Set
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

from torch import nn

from cleave.arrays import DType
from cleave.errors import LayerGraphError
from cleave.fleet.fleet import Fleet
from cleave.fleet.local_fallback import FleetPresence
from cleave.fleet.server_speed import graphs_here
from cleave.graphs.graph_cache import GraphCache
from cleave.graphs.model_graphs import ModelGraphs, model_graphs
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

_P = ParamSpec("_P")
_Graphs = TypeVar("_Graphs")


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
    plainly: Callable[[], AbstractContextManager[None]],
) -> StagedModel | None:
    """Export a model's layers as graphs and return a `StagedModel` that uses them.

    Args:
        job: settings of the job; the method is `stages` or `auto`.
        tiles: forecasts the duration of a step by tiles; used only with the method `auto`.
        stop: returns True if training must stop.
        note: called with messages for the user.
        presence: called when devices can no longer run a step, and when they can again.
        own_products: returns the context manager in which the PS runs its part of a step.
        plainly: returns a context manager that restores the model's original modules. Graphs that a
            later plan needs are exported in this context.

    Returns:
        The staged model; None if the method is `auto` and the graphs cannot be exported.

    Raises:
        LayerGraphError: if the method is `stages` and the graphs cannot be exported.
    """
    auto = job.method == Method.AUTO.value
    dtype = DType(job.dtype)
    here = graphs_here()
    accelerated = here.accelerates(dtype if dtype is DType.BF16 else None)
    packed = packed_by(model) if job.packing == Packing.SEPARATE.value else None
    making = partial(
        _exported_late, plainly, model.train(), job.seq, GraphCache.of_user(),
        packed=packed, progress=lambda what: note(f"making {what}"),
    )  # fmt: skip
    try:
        graphs = making()
    except LayerGraphError as error:
        if not auto:
            raise
        note(f"no stages: {error}")
        return None
    if said := described_refusals(graphs):
        note(said)
    local = job.fallback == FallbackMode.LOCAL.value

    def in_parts() -> ModelWork:
        with plainly():
            made = making(in_parts=True, pieces=pieces_of_sequence(job.seq))
        return ModelWork(model, made, dtype)

    return StagedModel(
        ModelWork(model, graphs, dtype),
        fleet.runtime,
        plan_stages,
        ps,
        tiles=tiles if auto else None,
        auditor=Auditor(job.audit, open_graph=here),
        loss_on=here if accelerated else None,
        in_parts=in_parts,
        local_after_s=job.fallback_after_s if local else None,
        stop=stop,
        note=note,
        presence=presence,
        own_products=own_products,
    )


def _exported_late(
    plainly: Callable[[], AbstractContextManager[None]], *args: Any, **options: Any
) -> ModelGraphs:
    """Return `model_graphs(...)`, but export what a plan needs later in the context `plainly()`."""
    graphs = model_graphs(*args, **options)

    def late(export: Callable[_P, _Graphs] | None) -> Callable[_P, _Graphs] | None:
        if export is None:
            return None

        def exported(*given: _P.args, **named: _P.kwargs) -> _Graphs:
            with plainly():
                return export(*given, **named)

        return exported

    return replace(
        graphs, slice_of_loss=late(graphs.slice_of_loss), embedding=late(graphs.embedding)
    )
