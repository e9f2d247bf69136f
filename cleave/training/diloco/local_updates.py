"""Trains by rounds of local updates (DiLoCo, arXiv 2311.08105). This is not exact training.

In a round, each device trains the whole model alone for some steps. The server averages how the
devices' weights have changed, and an outer optimizer moves the server's weights accordingly.

With several fragments or overlap, rounds are those of Streaming DiLoCo (arXiv 2501.18512): each
exchanges one fragment of the model, and devices continue with their steps during the exchange.

A checkpoint contains the optimizer moments of devices if their upload is a small part of the time.
A device with the same name and the same credential continues with them after `--resume`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from cleave import graph_names as names
from cleave.arrays import Array, DType, unpack
from cleave.errors import FleetError, UsageError
from cleave.fleet.fleet import Fleet
from cleave.fleet.local_fallback import LOOK_S, AbandonedError, FleetPresence
from cleave.planner.local_updates import ExchangeKind, Rounds, planned_steps
from cleave.planner.plan import DeviceRates
from cleave.scheduler.counters import FleetCounters
from cleave.scheduler.rounds.shares import bounded_shares, outliers
from cleave.scheduler.rounds.work import (
    DeviceKey,
    InnerState,
    RoundPart,
    RoundResult,
    RoundWork,
)
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.work import SumName
from cleave.training.data.batches import Batch
from cleave.training.diloco.outer import OuterOptimizer, outer_optimizer
from cleave.training.diloco.whole_model import WholeModel
from cleave.training.loop.context import TrainContext
from cleave.training.loop.finite import check_loss
from cleave.training.loop.job import JobSpec
from cleave.training.loop.optimizer import update_rule

INNER: Final = "inner"  # key of the devices with moments in a checkpoint's metadata
_COLLECTING: Final = 0.1  # largest part of the time in which devices return moments
_PATIENCE_S: Final = 10.0  # additional time that devices have for it
# Prefixes of tensors in a checkpoint, and the names of a device's arrays.
_UNSEEN: Final = "optimizer.unseen."
_INNER: Final = "optimizer.inner."
# Attributes of `RoundPart` that a checkpoint keeps of a device.
_META: Final = ("name", "identity", "updates", "late")
_INNER_NAMES: Final = (names.moment(0), names.moment(1), names.ERROR)


@dataclass(frozen=True, slots=True)
class Round:
    """The result of a round.

    Attributes:
        loss: mean loss of the local steps, each before its update, weighted by tokens.
        tokens: number of tokens that the devices trained on.
    """

    loss: float
    tokens: int


class LocalUpdates:
    """Trains a model by rounds of local updates on a fleet.

    Args:
        rounds: how often and in which form weights are exchanged.
        stop: returns True if training must stop.
        note: called with messages for the user.
        presence: called when no device can take part, and when a device can again.
    """

    def __init__(
        self,
        model: WholeModel,
        fleet: Fleet,
        outer: OuterOptimizer,
        rounds: Rounds,
        *,
        stop: Callable[[], bool],
        note: Callable[[str], None],
        presence: Callable[[FleetPresence], None],
    ) -> None:
        self._outer = outer
        self._model, self._fleet, self._runtime = model, fleet, fleet.runtime
        self._rounds = rounds
        self._stop, self._note, self._presence = stop, note, presence
        self._number = 0
        self._flops_per_s: dict[int, float] = {}  # as measured in the last round
        self._updates: Mapping[SumName, Mapping[str, StageArray]] = {}
        # The rounding error of the last change of each weight, to be added to the next change.
        self._unseen = {key: torch.zeros_like(t) for key, t in model.tensors.items()}
        # From the last checkpoint, until their device continues with them.
        self._restored: dict[DeviceKey, list[InnerState]] = {}
        self._collected: list[_Moments] = []  # for the next checkpoint
        self._collected_s = fleet.runtime.now()  # when devices last returned them
        self._there = True
        self._said: set[str] = set()

    @property
    def steps(self) -> int:
        """Return the local steps of the fastest device in a round."""
        return self._rounds.steps

    def round(self, rate: Callable[[int], float], step: Callable[[], list[Batch]]) -> Round:
        """Run a round, and change the model's weights.

        Args:
            rate: returns the inner learning rate of a local step of the round, from 0.
            step: returns the micro-batches of the next local step.

        Raises:
            AbandonedError: if training stops during the round. The weights have not changed.
            DivergedError: if the loss is not finite on every device.
        """
        self._collected = []
        while True:
            steps = planned_steps(self._speeds(), self._rounds.steps)
            self._number += 1
            result = self._result(self._work(steps, rate, step), self._stop)
            for name, reason in result.lost.items():
                self._note(f"the work of {name} in this round is lost: {reason}")
            if result.parts:
                return self._apply(result.parts)

    def _work(
        self,
        steps: Mapping[int, int],
        rate: Callable[[int], float],
        step: Callable[[], list[Batch]],
    ) -> RoundWork:
        """Return the next round. Devices take turns drawing the data for their steps."""
        drawn: dict[int, list[Sequence[Batch]]] = {device: [] for device in steps}
        for number in range(max(steps.values())):
            for device in drawn:
                if number < steps[device]:
                    drawn[device].append(step())
        model = self._model
        return RoundWork(
            model.work,
            self._number,
            {d: [model.micro_batches(list(one)) for one in given] for d, given in drawn.items()},
            {key: model.array_of(tensor, DType.FP32) for key, tensor in model.tensors.items()},
            self._updates,
            lambda number, updates, late: model.scalars(
                rate(number), math.inf if late else updates
            ),
            self._fragment,
            self._rounds.overlapped(len(steps)),
            self._restored,
        )

    @property
    def _fragment(self) -> Sequence[SumName]:
        """Return the keys of the parameters that the current round exchanges."""
        fragments = self._model.fragments
        return fragments[(self._number - 1) % len(fragments)]

    def _speeds(self) -> dict[int, float]:
        """Return the speeds of the devices that can hold the model. Wait for the first one."""
        while True:
            able = self._runtime.stage_devices()
            local = self._model.work
            needed_bytes = local.held_bytes + local.working_bytes
            speeds = {
                device: self._flops_per_s.get(device, rates.flops_per_s)
                for device, rates in able.items()
                if rates.memory_bytes >= needed_bytes
            }
            if speeds:
                self._tell(there=True)
                return speeds
            self._tell(there=False)
            self._explain(able, needed_bytes)
            if self._stop():
                raise AbandonedError("training is stopping")
            self._runtime.next_outcome(LOOK_S)

    def _explain(self, able: Mapping[int, DeviceRates], needed_bytes: int) -> None:
        """Note once why no device can take part."""
        if able:
            most = max(rates.memory_bytes for rates in able.values())
            why = (
                f"each device holds the whole model, which takes {needed_bytes / 1e6:,.0f} MB, and "
                f"no device offers more than {most / 1e6:,.0f} MB"
            )
        else:
            why = self._runtime.why_no_stages()
        if why not in self._said:
            self._said.add(why)
            self._note(f"training waits: {why}")

    def _tell(self, *, there: bool) -> None:
        if there != self._there:
            self._there = there
            self._presence(FleetPresence.PRESENT if there else FleetPresence.ABSENT)

    def _result(self, work: RoundWork, stop: Callable[[], bool]) -> RoundResult:
        self._runtime.begin_round(work)
        while True:
            outcome = self._runtime.next_outcome(LOOK_S)
            if isinstance(outcome, RoundResult):
                return outcome
            if outcome is not None:
                raise FleetError(f"the round cannot be completed: {outcome}")
            if stop():
                raise AbandonedError("training is stopping")

    def collect(self) -> None:
        """Let devices return their optimizer moments, for a checkpoint of the present weights.

        Do nothing if devices hold none, or if that takes more than a tenth of the time since the
        last call that did it.
        """
        if not self._model.moments and self._rounds.exchange is not ExchangeKind.SPARSE:
            return
        runtime = self._runtime
        devices, now_s = runtime.stage_devices(), runtime.now()
        dtype = DType.FP32 if self._rounds.exchange is ExchangeKind.FP32 else DType.BF16
        slowest = min((d.uplink_bytes_per_s for d in devices.values()), default=math.inf)
        upload_s = dtype.itemsize * self._model.moments * self._model.elements / slowest
        if self._collected or upload_s > _COLLECTING * (now_s - self._collected_s):
            return
        given_up_s = now_s + 2 * upload_s + _PATIENCE_S
        work = RoundWork(
            self._model.work, self._number, dict.fromkeys(devices, ()), {}, {},
            lambda number, updates, late: (), (), collected=dtype.value,
        )  # fmt: skip
        try:
            result = self._result(work, lambda: runtime.now() > given_up_s)
        except AbandonedError:
            self._note(
                "the checkpoint lacks the devices' optimizer moments, because the devices took too "
                "long to return them"
            )
            return
        self._collected_s = runtime.now()
        for name, reason in result.lost.items():
            self._note(f"the checkpoint lacks the optimizer moments of {name}: {reason}")
        for part in result.parts:
            if moments := self._moments(part, dtype):
                self._collected.append(moments)
            else:
                self._note(
                    f"the checkpoint lacks the optimizer moments of {part.name}, because they are "
                    "not finite"
                )

    def _moments(self, part: RoundPart, dtype: DType) -> _Moments | None:
        """Return the moments that a device has returned; None if no correct device has such."""
        found: dict[tuple[SumName, str], Tensor] = {}
        for key, arrays in part.difference.items():
            tensor = self._model.tensors[key]
            for what, rows in arrays.items():
                columns = tensor.shape[-1] if tensor.ndim else 1
                parts = [
                    torch.from_numpy(
                        unpack(p, len(p) // (columns * dtype.itemsize), columns, dtype).float32()
                    )
                    for p in rows
                ]
                held = torch.cat(parts).reshape(tensor.shape)
                if not held.isfinite().all() or (what == names.moment(1) and held.min() < 0):
                    return None
                found[key, what] = held.bfloat16() if dtype is DType.BF16 else held
        meta = {name: getattr(part, name) for name in _META}
        return _Moments(meta, found)

    def _apply(self, parts: Sequence[RoundPart]) -> Round:
        """Average the devices' differences, and change the weights."""
        tokens = {part.device: part.tokens for part in parts}
        losses = {part.device: _loss(part) for part in parts}
        norms = {p.device: self._norm(p) if math.isfinite(losses[p.device]) else math.nan
                 for p in parts}  # fmt: skip
        for part in parts:
            if part.compute_s:
                self._flops_per_s[part.device] = part.flops / part.compute_s
        ages = {part.device: part.updates / max(1, part.steps) for part in parts}
        shares, unusual = bounded_shares(tokens, norms, ages), outliers(tokens, norms, ages)
        used = sum(tokens[device] for device in shares)
        loss = sum(losses[d] * tokens[d] for d in shares) / used if used else math.nan
        check_loss(loss)
        for part in parts:
            if part.device in unusual:
                used_how = "is scaled down" if part.device in shares else "is not used"
                self._note(
                    f"{part.name} returned an unusual difference, which {used_how}: its norm is "
                    f"{norms[part.device]:.3g}"
                )
        self._updates = {key: self._change(key, parts, shares) for key in self._fragment}
        return Round(loss, used)

    def _norm(self, part: RoundPart) -> float:
        squares = 0.0
        for key in self._fragment:
            found = self._difference(key, part)
            squares += float(np.dot(found, found))
        return math.sqrt(squares) if math.isfinite(squares) else math.inf

    def _difference(self, key: SumName, part: RoundPart) -> Array:
        model = self._model
        elements, work = model.tensors[key].numel(), model.work.exchange[key]
        return model.exchange.difference(work, elements, part.difference[key])

    def _change(
        self, key: SumName, parts: Sequence[RoundPart], shares: Mapping[int, float]
    ) -> Mapping[str, StageArray]:
        """Change one parameter. Return the arrays of this change for the devices."""
        model = self._model
        parameter = model.tensors[key]
        average = torch.zeros(parameter.numel())
        for part in parts:
            if share := shares.get(part.device, 0.0):
                average.add_(torch.from_numpy(self._difference(key, part)), alpha=share)
        wanted = self._outer.change(model.names[key], average.reshape(parameter.shape))
        unseen = self._unseen[key]
        seen, sent = model.exchange.update(wanted.add_(unseen))
        unseen.copy_(wanted).sub_(seen)
        # Devices that joined in this round may still read the memory of the old value.
        parameter.data = parameter.data + seen
        return sent

    def close(self) -> None:
        """End the current round, and let devices drop the model."""
        self._runtime.end_steps()

    def counters(self) -> FleetCounters:
        """Return the current values of the fleet's counters."""
        return self._fleet.counters()

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint has besides weights: the outer optimizer's state and others."""
        model, found = self._model, self._outer.tensors()
        if self._rounds.exchange is not ExchangeKind.FP32:
            found |= {_UNSEEN + model.names[key]: held for key, held in self._unseen.items()}
        for number, moments in enumerate(self._collected):
            for (key, what), tensor in moments.tensors.items():
                found[f"{_INNER}{number}.{what}.{model.names[key]}"] = tensor
        return found

    def meta(self) -> list[dict[str, Any]]:
        """Return the devices whose moments `tensors` returns, for a checkpoint."""
        return [dict(each.meta) for each in self._collected]

    def load(
        self, tensors: Mapping[str, Tensor], meta: Sequence[Mapping[str, Any]], step: int
    ) -> None:
        """Load what `tensors` and `meta` have returned, for a checkpoint after `step` steps."""
        model = self._model
        self._number = step // self.steps
        self._outer.load_tensors(tensors)
        for key, unseen in self._unseen.items():
            if (held := tensors.get(_UNSEEN + model.names[key])) is not None:
                unseen.copy_(held)
        self._restored = {}
        for number, one in enumerate(meta):
            arrays: dict[SumName, dict[str, StageArray]] = {key: {} for key in model.tensors}
            for key, what in product(model.tensors, _INNER_NAMES):
                if (held := tensors.get(f"{_INNER}{number}.{what}.{model.names[key]}")) is not None:
                    arrays[key][what] = model.array_of(held.float(), DType.FP32)
            if all(len(found) == model.moments for found in arrays.values()):
                state = InnerState(one["updates"], one["late"], arrays)
                self._restored.setdefault((one["name"], one["identity"]), []).append(state)


@dataclass(frozen=True, slots=True, eq=False)
class _Moments:
    """The optimizer moments of a device and, if devices keep errors, what it has not returned."""

    meta: Mapping[str, Any]
    tensors: Mapping[tuple[SumName, str], Tensor]


def local_updates(
    job: JobSpec,
    model: nn.Module,
    context: TrainContext,
    presence: Callable[[FleetPresence], None],
) -> LocalUpdates:
    """Prepare local updates for a job.

    Raises:
        UsageError: if the job has no fleet, or devices cannot train the model alone.
    """
    if context.fleet is None:
        raise UsageError("--method diloco needs devices; omit --devices 0 or --method")
    if context.ranks.count > 1:
        raise UsageError("--method diloco supports only one server; omit --servers")
    if not context.fleet.runtime.keeps_state:
        raise UsageError(
            "--method diloco cannot run when a server on Ray trains the model, because devices "
            "cannot keep state between rounds; use --method stages"
        )
    context.note(
        f"diloco is not exact: devices train alone for {job.every} steps, so the losses differ "
        f"from those of exact training"
    )
    rounds = Rounds(job.every, ExchangeKind(job.exchange), job.fragments, job.overlap)
    whole = WholeModel(
        model,
        batch=job.batch,
        seq=job.seq,
        dtype=DType(job.dtype),
        rule=update_rule(job),
        clip=job.clip,
        rounds=rounds,
        progress=lambda what: context.note(f"making {what}"),
    )
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    outer = outer_optimizer(rounds.exchange, job.outer_lr, job.outer_momentum, trained)
    return LocalUpdates(
        whole,
        context.fleet,
        outer,
        rounds,
        stop=context.stop,
        note=context.note,
        presence=presence,
    )


def _loss(part: RoundPart) -> float:
    """Return the mean loss of a device's local steps."""
    values = (unpack(p, 1, 1, DType.FP32).float32()[0, 0] for p in part.losses.values())
    return float(sum(map(float, values))) / part.steps if part.steps else math.nan
