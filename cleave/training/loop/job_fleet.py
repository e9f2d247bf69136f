"""How one job uses its fleet: by stages, by tiles or not at all, decided before each step.

By tiles, the fleet multiplies for the model's linear layers. By stages, devices run whole layers.
With `--method auto` both are ready, and each step uses the method predicted to be fastest on the
connected devices. Layer graphs are built when the first device connects that can run them.
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
    """Callbacks of a job's fleet.

    Attributes:
        note: called with messages for the user.
        presence: called when devices connect, or the last one leaves.
        stuck: called with the reason when no device can compute a product.
        applied: returns whether the current step has already updated some parameters.
    """

    note: Callable[[str], None]
    presence: Callable[[FleetPresence], None]
    stuck: Callable[[str], None]
    applied: Callable[[], bool]


class JobFleet:
    """Decides, before each step, how one job uses its fleet; wraps the fleet for tiles.

    Args:
        job: the job.
        spec: sizes of its model.
        model: the model, as built by transformers; its linear layers are changed in place.
        fleet: the devices.
        journal: keeps products; None without one.
        checkpointing: whether layers keep only their inputs for the backward pass.
        clock: returns seconds.
        stop: returns whether training is stopping.
        reports: the callbacks.
        packed: how the model separates documents; None if they are joined.
        by_tiles: whether to rule out steps by stages.

    Attributes:
        staged: trains the model by stages; None until prepared.

    Raises:
        LayerGraphError: with `--method stages` when no layer can become a graph.
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
        # Stages have no products for the journal, and no fp16.
        by_tiles |= journal is not None or job.dtype == Precision.FP16.value
        self._looks = method is Method.AUTO and not by_tiles
        if method is Method.STAGES:  # inspects layers before they are changed
            self.staged = self._new_staged()
        # Layers that no device can run as a whole may use tiles.
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
        """Return the clock of the fleet's seconds: `virtual` or `wall`."""
        return self._fleet.clock

    def capacity(self) -> float:
        """Return the FLOP/s of the devices, or of the PS if it computes without devices."""
        _, devices = self._fleet.runtime.fleet_rates()
        if self._job.method == Method.STAGES.value:  # tile-only devices cannot do its steps
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
        """Return the predicted seconds of a step of these micro-batches."""
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
            batches: the step's micro-batches, or this server's part of them.
            learned: number of learned tokens in the whole step, if other servers do a part of it.

        Returns:
            That loss, or these tokens' contribution to it; or why the caller must compute the step
            with the model itself.

        Raises:
            AbandonedError: when training stops.
            FleetError: when the fleet cannot do the step.
        """
        if self._looks:
            self._look()
        if self.staged is None:
            return NotByStages("the job does not train by stages")
        loss = self.staged.gradients(_rows(batches, self._packed), learned)
        if isinstance(loss, NotByStages):  # frees memory for tiles
            self.staged.close()
        return loss

    def _own_products(self, training: Set[int]) -> AbstractContextManager[None]:
        """Return a context for the server's own products in a step by stages.

        With no device but the `training` ones, the server multiplies alone: they lack the memory.

        Args:
            training: the devices that train layers.
        """
        _, there = self._fleet.runtime.fleet_rates()
        if self._selection is None or any(rates.device not in training for rates in there):
            return nullcontext()
        return self._selection.left_alone()

    def counting_tasks(self) -> AbstractContextManager[None]:
        """Return a context that counts the tasks of a step."""
        return self._fleet.runtime.counting_tasks()

    def counters(self) -> FleetCounters:
        """Return the fleet's counters."""
        return (self._fallback or self._fleet).counters()

    def kept(self) -> Kept:
        """Return the GEMMs that the PS kept, or that `--offload auto` would have kept."""
        return self._selection.kept() if self._selection else Kept(0, 0, 0.0, ())

    def close(self) -> None:
        """Withdraw work in flight."""
        if self.staged is not None:
            self.staged.close()
        self._fleet.abandon()

    def _look(self) -> None:
        """Build the layer graphs once a device is connected that can run them."""
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
        """Build the staged model from the plain layers; None if impossible."""
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
    """Concatenate several micro-batches into one."""
    ids, labels, positions = (
        None if parts[0] is None else torch.cat(parts) for parts in zip(*batches, strict=True)
    )
    assert ids is not None
    assert labels is not None
    return Rows(ids, labels, mask_for(packed, positions), positions)


def _fallback(job: JobSpec) -> Fallback | None:
    """Return the fallback that multiplies while no device is connected; None to wait."""
    if job.fallback != FallbackMode.LOCAL.value:
        return None
    return Fallback(TorchBackend(), job.fallback_after_s)
