"""How one job uses its fleet: by stages, by tiles or not at all, looked at again before each step.

By tiles the model's linear layers multiply on the fleet. By stages devices do the passes of whole
layers. With `--method auto` both are ready, and each step goes the way that is predicted to be the
fastest with the devices that are there; graphs of layers are made when the first device comes that
could run them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from cleave.arrays import DType
from cleave.fleet.counters import FleetCounters
from cleave.fleet.fleet import Fleet
from cleave.fleet.local_fallback import Fallback, FallbackFleet, FleetPresence, Leaving
from cleave.fleet.product import Multiplier
from cleave.fleet.selection import Kept, SelectiveFleet, Selector, measure_ps
from cleave.graphs.packed import PackedBy, mask_for
from cleave.machine.backends import TorchBackend
from cleave.planner.forecast import MethodChoice
from cleave.planner.plan import Method
from cleave.planner.stages.model import PsCompute
from cleave.training.data.batches import Batch
from cleave.training.loop.job import FallbackMode, JobSpec, OffloadMode, Precision
from cleave.training.loop.journal import Journal, JournaledFleet
from cleave.training.loop.methods import TilesForecaster, choose_without_stages, tile_gemms
from cleave.training.lora.spec import LoraSpec
from cleave.training.stages.stage_setup import staged_model
from cleave.training.stages.staged import NotByStages, Rows, StagedModel
from cleave.training.tiles.offload import restore, send
from cleave.workload.models.build import disable_checkpointing, enable_checkpointing
from cleave.workload.registry import ModelSpec


@dataclass(frozen=True, slots=True)
class FleetReports:
    """Holds what a job's fleet calls to report, and to ask whether the step was applied.

    Attributes:
        note: called with what a user should know.
        presence: called when devices come, or none is there any more.
        stuck: called with the reason when no device can do a product.
        applied: says whether the step under way has updated some parameters already.
    """

    note: Callable[[str], None]
    presence: Callable[[FleetPresence], None]
    stuck: Callable[[str], None]
    applied: Callable[[], bool]


class JobFleet:
    """Decides, before each step, how one job uses its fleet; wraps it for tiles.

    Args:
        job: the job.
        spec: its model's sizes.
        model: the model, as transformers made it; its linear layers are changed in place.
        fleet: the devices.
        journal: keeps products, if any.
        checkpointing: whether layers keep only their inputs for the backward pass.
        clock: in seconds.
        stop: says whether training is to stop.
        reports: what it calls to report.
        packed: what tells the model's documents apart; None where a sequence is one.
        by_tiles: whether no step may go by stages.

    Attributes:
        staged: what trains the model by stages, once it was prepared.

    Raises:
        LayerGraphError: with `--method stages` where no layer can become a graph.
    """

    def __init__(
        self,
        job: JobSpec,
        spec: ModelSpec,
        model: nn.Module,
        fleet: Fleet,
        journal: Journal | None,
        *,
        checkpointing: bool,
        clock: Callable[[], float],
        stop: Callable[[], bool],
        reports: FleetReports,
        packed: PackedBy | None = None,
        by_tiles: bool = False,
    ) -> None:
        self._job, self._spec, self._model = job, spec, model
        self._fleet, self._stop, self._reports = fleet, stop, reports
        self._checkpointing, self._packed = checkpointing, packed
        self._selector = Selector(fleet.planner, TorchBackend())
        self._fallback: FallbackFleet | None = None
        self._selection: SelectiveFleet | None = None
        self._tiles: Multiplier | None = None
        self.staged: StagedModel | None = None
        self._said = ""
        gemms = tile_gemms(job, spec)
        self._tiles_forecaster = TilesForecaster(gemms, DType(job.dtype), fleet)
        self._quantized = bool(job.lora and LoraSpec.of(job.lora).bits)
        method = Method(job.method)
        # The journal keeps products, and stages have none; nor do they travel in fp16.
        by_tiles |= journal is not None or job.dtype == Precision.FP16.value
        self._looks = method is Method.AUTO and not by_tiles
        if method is Method.STAGES:  # layers are looked at before they are changed
            self.staged = self._new_staged()
        # Layers that no device can do as a whole may go by tiles.
        mixed = self.staged is not None and bool(self.staged.passes.runs)
        if mixed or method in (Method.TILES, Method.AUTO):
            leaving = Leaving(stop, reports.applied, TorchBackend(), clock)
            self._fallback = FallbackFleet(
                fleet, reports.presence, _fallback(job), leaving, reports.stuck
            )
            keep = job.offload == OffloadMode.AUTO.value or method is not Method.TILES
            self._selection = SelectiveFleet(self._fallback, fleet, self._selector, keep=keep)
            self._tiles = self._selection
            if journal is not None:
                self._tiles = JournaledFleet(self._selection, journal)
            if (said := send(model, self._tiles).shortfall) and not self._quantized:
                reports.note(said)

    @property
    def clock(self) -> str:
        """Return `virtual` or `wall`: the clock that the fleet's seconds count on."""
        return self._fleet.clock

    def capacity(self) -> float:
        """Return what can be done now, in FLOP/s: by the devices, or here where none is there."""
        _, devices = self._fleet.runtime.fleet_rates()
        if self._job.method == Method.STAGES.value:  # nobody else can do its steps
            devices = list(self._fleet.runtime.stage_devices().values())
        if devices or self._job.fallback != FallbackMode.LOCAL.value:
            return sum(rates.flops_per_s for rates in devices)
        return self._ps.flops_per_s

    @cached_property
    def _ps(self) -> PsCompute:
        """Return the speed of the parameter server, measured once."""
        speed = measure_ps(TorchBackend(), DType(self._job.dtype), time.perf_counter)
        return PsCompute(speed.flops_per_s, 0.0)

    def predicted_s(self, batches: Sequence[Batch]) -> float:
        """Return how long a step of these micro-batches is predicted to take."""
        if self._looks:
            self._look()
        if self.staged is not None:
            seconds = self.staged.predicted_s(_rows(batches, self._packed))
            if not isinstance(seconds, NotByStages):
                return seconds
        choice = self._choice_without_stages()
        tiles = replace(choice, asked=Method.TILES).considered
        if self._job.method == Method.TILES.value and not tiles.refused:
            return tiles.step_s
        return choice.chosen.step_s

    def _choice_without_stages(self) -> MethodChoice:
        return choose_without_stages(self._job, self._spec, self._tiles_forecaster, self._ps)

    def gradients(
        self, batches: Sequence[Batch], learned: int | None = None
    ) -> float | NotByStages:
        """Add the gradients of a step's mean loss to the parameters by stages.

        Args:
            batches: the step's micro-batches.
            learned: the tokens that the mean is of, where others do more of them.

        Returns:
            That loss, or what these tokens add to it; or why the model itself is to compute the
            step, whose linear layers multiply on the fleet where that is faster.

        Raises:
            AbandonedError: when training is to stop.
            FleetError: when the fleet cannot do the step.
        """
        if self._looks:
            self._look()
        if self.staged is None:
            return NotByStages("the job does not train by stages")
        loss = self.staged.gradients(_rows(batches, self._packed), learned)
        if isinstance(loss, NotByStages):  # arrays of stages would take the memory for tiles
            self.staged.close()
        return loss

    def _own_products(self, training: Set[int]) -> AbstractContextManager[None]:
        """Return a context for what the server multiplies itself in a step by stages.

        Devices that train layers have no memory left for it; others may take it by tiles.

        Args:
            training: the devices that do.
        """
        _, there = self._fleet.runtime.fleet_rates()
        if self._selection is None or any(rates.device not in training for rates in there):
            return nullcontext()
        return self._selection.left_alone()

    def counting_tasks(self) -> AbstractContextManager[None]:
        """Return a context in which the tasks of a step are counted."""
        return self._fleet.runtime.counting_tasks()

    def counters(self) -> FleetCounters:
        """Return what the fleet did so far."""
        return (self._fallback or self._fleet).counters()

    def kept(self) -> Kept:
        """Return what stayed on the PS, or what `--offload auto` would have kept there."""
        return self._selection.kept() if self._selection else Kept(0, 0, 0.0, ())

    def close(self) -> None:
        """Withdraw what is still under way."""
        if self.staged is not None:
            self.staged.close()
        self._fleet.abandon()

    def _look(self) -> None:
        """Make the graphs of the layers once a device is there that could run them."""
        if self._fleet.runtime.stage_devices():
            self._looks = False
            self.staged = self._new_staged()
            return
        said = f"no stages: {self._fleet.runtime.why_no_stages()}. "
        if self._quantized:
            said += "The parameter server computes the layers alone."
        else:
            said += self._choice_without_stages().why
        if said != self._said:
            self._said = said
            self._reports.note(said)

    def _new_staged(self) -> StagedModel | None:
        """Make what trains the model by stages, from its plain layers; None where it cannot be."""
        restore(self._model)
        if self._checkpointing:
            disable_checkpointing(self._model)
        try:
            return staged_model(
                self._job,
                self._model,
                self._fleet,
                self._ps,
                self._tiles_forecaster,
                stop=self._stop,
                note=self._reports.note,
                presence=self._reports.presence,
                own_products=self._own_products,
            )
        finally:
            if self._checkpointing:
                enable_checkpointing(self._model)
            if self._tiles is not None:
                send(self._model, self._tiles)


def _rows(batches: Sequence[Batch], packed: PackedBy | None) -> Rows:
    """Return the sequences of several micro-batches as those of one."""
    ids, labels, positions = (
        None if parts[0] is None else torch.cat(parts) for parts in zip(*batches, strict=True)
    )
    assert ids is not None
    assert labels is not None
    return Rows(ids, labels, mask_for(packed, positions), positions)


def _fallback(job: JobSpec) -> Fallback | None:
    """Return what multiplies while no device is there; None to wait."""
    if job.fallback != FallbackMode.LOCAL.value:
        return None
    return Fallback(TorchBackend(), job.fallback_after_s)
