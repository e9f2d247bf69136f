"""Run a job's steps by stages or tiles on the fleet, or on the PS alone.

With tiles, the fleet computes the matrix multiplications of the model's linear layers. With stages,
devices run whole layers. With `--method auto`, each step uses the method that is predicted to be
fastest on the connected devices. Layer graphs are built once a device can run them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Final

import torch
from torch import Tensor, nn

from cleave.arrays import DType
from cleave.fleet.fleet import Fleet
from cleave.fleet.local_fallback import Fallback, FallbackFleet, FleetPresence, Leaving
from cleave.fleet.product import Multiplier
from cleave.fleet.selection import Kept, SelectiveFleet, Selector
from cleave.fleet.server_speed import measured_server
from cleave.graphs.packed import PackedBy, mask_for
from cleave.machine.backends import TorchBackend
from cleave.machine.load import OtherLoad
from cleave.machine.sensors import return_free_memory
from cleave.planner.forecast import MethodChoice
from cleave.planner.plan import Method, StateMode
from cleave.planner.stages.model import PsCompute
from cleave.scheduler.counters import FleetCounters
from cleave.scheduler.stages.outcomes import DeviceUse
from cleave.training.data.batches import Batch
from cleave.training.loop.job import FallbackMode, JobSpec, OffloadMode, Precision
from cleave.training.loop.journal import Journal, JournaledFleet
from cleave.training.loop.methods import TilesForecaster, choose_without_stages, tile_gemms
from cleave.training.loop.optimizer import Optimizer
from cleave.training.stages.resident import ResidentState, StateStorage
from cleave.training.stages.stage_setup import staged_model
from cleave.training.stages.staged import NotByStages, Rows, StagedModel
from cleave.training.tiles.offload import restore, send
from cleave.workload.build import disable_checkpointing, enable_checkpointing
from cleave.workload.registry import ModelSpec

_FEW_DEVICES: Final = 16  # number of devices up to which a step's `used` has all of them
_SLOW_DTYPE: Final = 1.5  # speed ratio above which the user is advised to use fp32


class JobFleet:
    """Runs a job on its fleet: whole steps by stages, or the model's GEMMs by tiles.

    For tiles, the model's linear layers are changed in place to compute on the fleet.

    Args:
        journal: stores the results of GEMMs; None to store no results.
        presence: called with the new `FleetPresence` whenever it changes.
        stuck: called with the reason if no device can compute a matrix multiplication.
        applied: returns True if the current step has already updated some parameters.
        packed: how attention is restricted to each document; None with `--packing joined`.
        by_tiles: whether `--method auto` must not use stages.

    Attributes:
        staged: runs steps by stages. None if the method never uses stages, or while no connected
            device can run layer graphs.

    Raises:
        LayerGraphError: if `--method` is `stages` and no layer can be converted to a graph.
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
        note: Callable[[str], None],
        presence: Callable[[FleetPresence], None],
        stuck: Callable[[str], None],
        applied: Callable[[], bool],
        packed: PackedBy | None = None,
        by_tiles: bool = False,
    ) -> None:
        self._job, self._spec, self._model = job, spec, model
        self._fleet, self._stop, self._note, self._presence = fleet, stop, note, presence
        self._checkpointing, self._packed = checkpointing, packed
        self._selector = Selector(fleet.planner, TorchBackend())
        self._fallback: FallbackFleet | None = None
        self._selection: SelectiveFleet | None = None
        self._tiles: Multiplier | None = None
        self.staged: StagedModel | None = None
        self._said = ""
        gemms = tile_gemms(job, spec)
        self._tiles_forecaster = TilesForecaster(gemms, DType(job.dtype), fleet)
        method = Method(job.method)
        # Steps by stages support neither the journal nor fp16.
        by_tiles |= journal is not None or job.dtype == Precision.FP16.value
        self._looks = method is Method.AUTO and not by_tiles
        if method is Method.STAGES:  # export the graphs before `send` changes the linear layers
            self.staged = self._new_staged()
            return_free_memory()
        # In a step by stages, layers without a graph run on the PS, and their GEMMs may use tiles.
        mixed = self.staged is not None and bool(self.staged.passes.runs)
        if mixed or method in (Method.TILES, Method.AUTO):
            leaving = Leaving(stop, applied, TorchBackend(), clock)
            local = job.fallback == FallbackMode.LOCAL.value
            fallback = Fallback(TorchBackend(), job.fallback_after_s) if local else None
            self._fallback = FallbackFleet(fleet, presence, fallback, leaving, stuck)
            keep = job.offload == OffloadMode.AUTO.value or method is not Method.TILES
            self._selection = SelectiveFleet(self._fallback, fleet, self._selector, keep=keep)
            self._tiles = self._selection
            if journal is not None:
                self._tiles = JournaledFleet(self._selection, journal)
            if (said := send(model, self._tiles).shortfall) and not self._job.quantized:
                note(said)

    @property
    def clock(self) -> str:
        """Return the kind of the fleet's clock: `virtual` or `wall`."""
        return self._fleet.clock

    def capacity(self) -> float:
        """Return the total FLOP/s of the connected devices that this job can use.

        If no device can be used, return the FLOP/s of the PS with `--fallback local`, otherwise 0.
        """
        _, devices = self._fleet.runtime.fleet_rates()
        if self._job.method == Method.STAGES.value:
            able = self._fleet.runtime.stage_devices().values()
            devices = [rates.for_graphs(self._job.dtype) for rates in able]
        if devices or self._job.fallback != FallbackMode.LOCAL.value:
            return sum(rates.flops_per_s for rates in devices)
        return self._ps.flops_per_s

    @cached_property
    def _ps(self) -> PsCompute:
        spec, parameters = self._spec, self._model.parameters()
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        sizes = spec.width, spec.ffn_width, spec.vocabulary, trained
        others = OtherLoad()
        found = measured_server(*sizes, DType(self._job.dtype))
        if remark := others.remark():
            self._note(
                f"this server's speed was measured {remark}, so forecasts may underrate the server"
            )
        if self._job.dtype != Precision.FP32.value:
            in_fp32 = measured_server(*sizes, DType.FP32).flops_per_s
            ratio = in_fp32 / found.flops_per_s
            if ratio > _SLOW_DTYPE:
                self._note(
                    f"this server multiplies {ratio:.0f} times as fast in fp32 as in "
                    f"{self._job.dtype}; without devices, --dtype fp32 is faster"
                )
        return found

    def predicted_s(self, batches: Sequence[Batch]) -> float:
        """Return the predicted duration, in seconds, of a step with the micro-batches `batches`."""
        if self._looks:
            self._look()
        if self.staged is not None:
            seconds = self.staged.forecast_s(_rows(batches, self._packed))
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
        """Compute a step's gradients by stages and accumulate them in the parameters' `grad`.

        Args:
            batches: the step's micro-batches; with several servers, this server's part.
            learned: number of learned tokens in the whole step; None to count them in `batches`.

        Returns:
            The contribution of `batches` to the step's mean loss, or the reason why the step cannot
            run by stages. The caller must then compute the gradients by another method.

        Raises:
            AbandonedError: if training stops during the step.
        """
        if self._looks:
            self._look()
        if self.staged is None:
            return NotByStages("the job does not train by stages")
        loss = self.staged.gradients(_rows(batches, self._packed), learned)
        if isinstance(loss, NotByStages):  # free the devices' memory for tiles
            self._fleet.runtime.end_steps()
        else:
            self._tell_of_idle_devices()
        return loss

    def _tell_of_idle_devices(self) -> None:
        """Report how many devices the last step by stages left out, if the numbers are new."""
        able, worked = len(self._fleet.runtime.stage_devices()), len(self.used)
        # In a larger fleet, only the busiest devices are known. Idle devices that may take over
        # state are hot spares.
        if able > _FEW_DEVICES or worked >= able or self.resident is not None:
            return
        said = (
            f"{able - worked} of {able} devices had no layers in this step, which is predicted to "
            f"be faster without them; `cleave devices` shows their measured speeds and links"
        )
        if said != self._said:
            self._said = said
            self._note(said)

    def _own_products(self, training: Set[int]) -> AbstractContextManager[None]:
        """Return a context manager that keeps all GEMMs on the PS if no device is free for tiles.

        `training` contains the IDs of devices that train layers, and so lack memory for tiles.
        """
        _, there = self._fleet.runtime.fleet_rates()
        if self._selection is None or any(rates.device not in training for rates in there):
            return nullcontext()
        return self._selection.left_alone()

    def counting_tasks(self) -> AbstractContextManager[None]:
        """Return a context manager that counts the tasks of one step for progress reports."""
        return self._fleet.runtime.counting_tasks()

    def counters(self) -> FleetCounters:
        """Return the current values of the fleet's counters."""
        counters = (self._fallback or self._fleet).counters()
        if (staged := self.staged) is None:
            return counters
        return replace(
            counters,
            predicted_s=staged.predicted_s,
            planning_s=staged.plans.planning_s,
            audit_s=staged.audit_s,
            loss_s=staged.loss_s,
            sums_s=staged.sums_s,
        )

    def updated(self, parameter: Tensor) -> None:
        """Send a parameter's new value to the devices that trained it in the last step."""
        if self.staged is not None:
            self.staged.updated(parameter)

    def keep_on_devices(self, optimizer: Optimizer, storage: StateStorage) -> None:
        """Make devices keep the layers' weights and optimizer state, if `--state` requires it.

        See `StagedModel.keep_on_devices`.
        """
        if self._job.state != StateMode.SERVER.value:
            assert self.staged is not None
            self.staged.plans.fetch_steps = self._job.fetch_steps
            if_faster = self._job.state == StateMode.AUTO.value
            self.staged.keep_on_devices(optimizer, storage, if_faster=if_faster, head=None)

    @property
    def resident(self) -> ResidentState | None:
        """Return the trained state on devices; None if the PS keeps the state."""
        return self.staged.resident if self.staged is not None else None

    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, int] | None:
        """Return the summed loss of batches, and their number of learned tokens.

        Devices with the layers' state compute the loss. Return None if the caller must compute it.

        Raises:
            AbandonedError: if training must stop and the evaluation is abandoned.
        """
        if self.staged is None or self.resident is None:
            return None
        total, learned = 0.0, 0
        for first in range(0, len(batches), self._job.accumulate):
            rows = _rows(batches[first : first + self._job.accumulate], self._packed)
            if (loss := self.staged.evaluate(rows)) is None:
                return None
            count = int((rows.targets >= 0).sum())
            total, learned = total + loss * count, learned + count
        return total, learned

    def sync(self) -> None:
        """Fetch the weights and optimizer state that are on devices, if any."""
        if self.staged is not None:
            self.staged.sync()

    def settle(self) -> None:
        """Call `sync` and wait for all audits.

        Raises:
            RolledBackError: if an audit found a wrong result.
        """
        if self.staged is not None:
            self.staged.settle()

    @property
    def undoable(self) -> int:
        """Return the number of recent steps to undo if an audit finds a wrong result."""
        return self.staged.undoable if self.staged is not None else 0

    def learn(self, step_s: float, update_s: float) -> None:
        """Correct the forecasts of steps by stages, based on the last step.

        Args:
            step_s: duration of the last step without planning, in seconds.
            update_s: part of `step_s` in which the parameters were updated, in seconds.
        """
        if self.staged is not None:
            self.staged.learn(step_s, update_s)

    @property
    def used(self) -> Sequence[DeviceUse]:
        """Return how long each device was busy in the last step by stages."""
        return self.staged.used if self.staged is not None else ()

    def kept(self) -> Kept:
        """Summarize the GEMMs that the PS is predicted to compute faster than the fleet."""
        return self._selection.kept() if self._selection else Kept(0, 0, 0.0, ())

    def close(self) -> None:
        """Release the device memory that stages use, and cancel the fleet's tasks in flight."""
        if self.staged is not None:
            self.staged.close()
        self._fleet.abandon()

    def _look(self) -> None:
        """Build the layer graphs if a device can run them. Otherwise, report the reason if new."""
        if self._fleet.runtime.stage_devices():
            self._looks = False
            self.staged = self._new_staged()
            return
        said = f"no stages: {self._fleet.runtime.why_no_stages()}. "
        if self._job.quantized:
            said += "The parameter server runs all layers itself."
        else:
            said += self._choice_without_stages().why
        if said != self._said:
            self._said = said
            self._note(said)

    def _new_staged(self) -> StagedModel | None:
        """Return a `StagedModel` of the model's original layers; None if no layer has a graph."""
        self._note("converting the layers to graphs that devices run")
        with self.plainly():
            return staged_model(
                self._job,
                self._model,
                self._fleet,
                self._ps,
                self._tiles_forecaster,
                stop=self._stop,
                note=self._note,
                presence=self._presence,
                own_products=self._own_products,
                plainly=self.plainly,
            )

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Return a context manager in which the PS alone runs the model."""
        restore(self._model)
        if self._checkpointing:
            disable_checkpointing(self._model)
        try:
            yield
        finally:
            if self._checkpointing:
                enable_checkpointing(self._model)
            if self._tiles is not None:
                send(self._model, self._tiles)


def _rows(batches: Sequence[Batch], packed: PackedBy | None) -> Rows:
    ids, labels, positions = (
        None if parts[0] is None else torch.cat(parts) for parts in zip(*batches, strict=True)
    )
    assert ids is not None
    assert labels is not None
    return Rows(ids, labels, mask_for(packed, positions), positions)
