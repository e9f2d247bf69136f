"""Search for the stages with the shortest step time.

The closed form (`estimate.py`) ranks arrangements. The best arrangements, and their changes, are
simulated event by event (`simulation.py`). In a large fleet, one search assigns whole groups of
devices to stages, and another search assigns each of the fastest devices individually.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

import numpy as np

from cleave.errors import DeviceMemoryError, PlanError
from cleave.planner.plan import DeviceRates, PsRates
from cleave.planner.stages.climb import StageClimb
from cleave.planner.stages.estimate import Arrangements, StageTables
from cleave.planner.stages.groupings import by_speed, groupings
from cleave.planner.stages.loss_slices import LossSlices, balanced, ways_to_slice
from cleave.planner.stages.model import PlannedStage, PsCompute, StageModel, StagePlan
from cleave.planner.stages.prediction import held_bytes, predict
from cleave.planner.stages.simulated import PIECE_BYTES

_FEW: Final = 16  # maximum number of devices that are assigned individually
_GROUPINGS: Final = 4  # number of groupings of a larger fleet that are improved
_SIMULATED: Final = 12  # maximum number of arrangements to simulate before any changes to them
_LEAST_SIMULATED: Final = 3
_REQUESTS: Final = 1_200  # total number of requests to simulate, per device of the fleet
_LEAST_REQUESTS: Final = 4_000  # minimum of this total
_MOST_REQUESTS: Final = 80_000  # maximum of this total
_SHARE_OF_WAY: Final = 0.5  # requests for each way to slice the loss, relative to unsliced plans
_PIECE_REQUESTS: Final = 0.3  # cost of simulating one piece of an activation, in requests
_AT_ONCE: Final = 8  # changes to simulate for one arrangement before the next one's turn
_PATIENCE: Final = 1.01  # lowers the priority of an arrangement after each turn
_REQUESTS_OF_CHANGES: Final = 100  # cost of estimating an arrangement's changes, in requests
_WORTH: Final = 1.5  # maximum ratio of an arrangement's estimate to the best, for simulation
_INTERLEAVED: Final = 12  # number of fastest plans for which interleaving is tried
_REQUESTS_OF_REFINING: Final = 8_000
_REFINED: Final = 8  # number of fastest plans to try with unequal slices or forward-first order
_TURNS: Final = (2, 3, 4)  # numbers of stages into which a stage is divided
_GAIN: Final = 1e-6  # minimum relative gain of a new best plan


def plan_stages(model: StageModel, devices: Sequence[DeviceRates], ps: PsCompute) -> StagePlan:
    """Return the plan with the shortest predicted step that the search finds.

    The search also tries plans in which some devices compute slices of the loss. The plan does not
    depend on the order of `devices`, and may leave some devices idle.

    Raises:
        DeviceMemoryError: if the devices have too little memory.
        PlanError: if the model has no layers, the batch has no micro-batches, or PS layers divide
            the model into more runs of layers than the number of devices that can hold a layer.
    """
    if not model.layers or not model.tokens:
        raise PlanError(
            f"cannot plan a step with {len(model.layers)} layers and {len(model.tokens)} "
            "micro-batches; it needs at least one of each"
        )
    devices = [device.for_graphs() for device in devices]
    tables = StageTables(model)
    able = _able(tables, sorted(devices, key=lambda device: device.device))
    if len(able) <= len(model.cuts):
        raise PlanError(
            "layers that stay on the parameter server divide the others into "
            f"{len(model.cuts) + 1} runs; each run needs its own device, but only {len(able)} of "
            f"{len(devices)} can hold a layer"
        )
    judge = _Judge(model, {device.device: device for device in devices}, ps)
    plain = _candidates(tables, able, ps, None)
    if not plain:
        raise _too_large(tables, able)
    requests = min(_MOST_REQUESTS, max(_LEAST_REQUESTS, _REQUESTS * len(able)))
    best = judge.search(plain, requests)
    sliced, ways = [], 0
    for slices in ways_to_slice(model, devices, ps, best) if model.most_slices > 1 else ():
        others = slices.others(able)
        holding = [d for d in others if d.memory_bytes >= tables.least_layer_bytes]
        sliced += _candidates(tables, holding, ps, slices)
        ways += 1
    if sliced:
        judge.search(sliced, round(requests * ways * _SHARE_OF_WAY))
    judge.interleave(requests)
    return judge.refine(min(requests, _REQUESTS_OF_REFINING))


@dataclass(frozen=True, slots=True)
class _Candidate:
    """An arrangement that may be simulated, because its estimated step time is short.

    Attributes:
        rank: number of better candidates found by all searches, or by changing the same candidate.
        seconds: the estimated step time in seconds.
        one: the arrangement, as `Arrangements` with one row.
        slices: the slices of the loss and their devices; None if the loss is not in slices.
    """

    rank: int
    seconds: float
    climb: StageClimb
    one: Arrangements
    slices: LossSlices | None


def _candidates(
    tables: StageTables, able: Sequence[DeviceRates], ps: PsCompute, slices: LossSlices | None
) -> list[_Candidate]:
    """Return the arrangements with the shortest estimated steps; empty if none is possible."""
    # The closed form treats the slices of the loss as a PS of the same throughput.
    as_ps = ps if slices is None else replace(ps, loss_flops_per_s=slices.flops_per_s)
    climbs = list(_climbs(tables, able, as_ps)) if able else []
    found = sorted(
        (seconds, number, row)
        for number, climb in enumerate(climbs)
        for row, seconds in enumerate(climb.seconds.tolist())
    )
    return [
        _Candidate(rank, seconds, climbs[n], climbs[n].found.take(np.array([row])), slices)
        for rank, (seconds, n, row) in enumerate(found[:_SIMULATED])
    ]


def _too_large(tables: StageTables, able: Sequence[DeviceRates]) -> DeviceMemoryError:
    needed = held_bytes(tables.model, PlannedStage(0, tables.layers, (0,)))
    offered = sum(device.memory_bytes for device in able)
    largest = float(tables.memory_of_layers.diagonal(1).max())
    why = f", because a single layer (or part) needs up to {largest / 1e6:.0f} MB on one device"
    return DeviceMemoryError(
        f"the layers need about {needed / 1e6:.0f} MB of memory, but do not fit on {len(able)} "
        f"devices with {offered / 1e6:.0f} MB in total{why if needed <= offered else ''}; connect "
        "more devices, or let them offer more memory"
    )


def _able(tables: StageTables, devices: Sequence[DeviceRates]) -> list[DeviceRates]:
    """Return the devices with enough memory for at least one layer.

    Raises:
        DeviceMemoryError: if no device has enough memory for a layer.
    """
    least = tables.least_layer_bytes
    able = [device for device in devices if device.memory_bytes >= least]
    if not able:
        most = max((device.memory_bytes for device in devices), default=0)
        raise DeviceMemoryError(
            f"a layer needs {least / 1e6:.0f} MB on a device, but the largest of {len(devices)} "
            f"devices offers {most / 1e6:.0f} MB; connect a device with more memory"
        )
    return able


def _climbs(
    tables: StageTables, devices: Sequence[DeviceRates], ps: PsCompute
) -> Iterator[StageClimb]:
    """Yield completed searches, each for devices that may have enough memory for all layers."""
    if max(device.memory_bytes for device in devices) < tables.memory_of_layers.diagonal(1).max():
        return  # no device has enough memory for one of the layers
    if len(devices) <= _FEW:
        if _may_hold(tables, devices):
            yield _one_by_one(tables, devices, ps)
        return
    order = by_speed(tables, devices)
    fastest = order[:_FEW]
    with_loss = [device for device in order if device.memory_bytes >= tables.memory_of_loss][:1]
    if with_loss and with_loss[0] not in fastest:
        fastest[-1] = with_loss[0]
    chosen = {
        grouping.devices(order): None
        for grouping in groupings(tables, order, order.index(with_loss[0]) if with_loss else None)
    }
    grouped = [StageClimb(tables, grouping, ps, fixed=True) for grouping in chosen]
    grouped.sort(key=lambda climb: min(climb.seconds, default=np.inf))
    if _may_hold(tables, fastest):
        yield _one_by_one(tables, fastest, ps)
    for climb in grouped[:_GROUPINGS]:
        climb.climb()
        yield climb


def _may_hold(tables: StageTables, devices: Sequence[DeviceRates]) -> bool:
    """Return False if the devices' memory is too small for all layers in any arrangement."""
    memory = np.array([device.memory_bytes for device in devices])
    return bool(tables.most_layers(memory).sum() >= tables.layers)


def _one_by_one(tables: StageTables, devices: Sequence[DeviceRates], ps: PsCompute) -> StageClimb:
    """Return a completed search that assigns each device to a stage individually.

    The result includes the arrangements found without compression, so compression cannot lead to a
    slower plan.
    """
    climb = StageClimb(tables, [[device] for device in devices], ps)
    climb.climb()
    if any(device.codes_downlink or device.codes_uplink for device in devices):
        as_plain = [replace(d, codes_downlink=False, codes_uplink=False) for d in devices]
        plain = StageClimb(tables, [[device] for device in as_plain], ps)
        plain.climb()
        climb.add(plain.found)
    return climb


def interleaved(stages: Sequence[PlannedStage], turns: int) -> tuple[PlannedStage, ...] | None:
    """Divide each stage into up to `turns` non-adjacent stages; return None if impossible.

    Each device keeps its number of layers. A micro-batch passes through each device up to `turns`
    times, so the last devices start earlier (arXiv 2104.04473, section 2.2).
    """
    sizes = [stage.stop - stage.first for stage in stages]
    if max(sizes) < turns or len(stages) == 1:
        return None
    found: list[PlannedStage] = []
    first = 0
    for turn in range(turns):
        for stage, size in zip(stages, sizes, strict=True):
            count = size * (turn + 1) // turns - size * turn // turns
            if count:
                found.append(replace(stage, first=first, stop=first + count, loss=False, pieces=1))
                first += count
    last = stages[-1]
    if last.loss and found[-1].devices != last.devices:
        return None
    return (*found[:-1], replace(found[-1], loss=last.loss))


@dataclass(slots=True)
class _Judge:
    """Simulates the most promising arrangements and stores the fastest plan.

    Attributes:
        requests_left: number of micro-batch passes that may still be simulated.
        best: the fastest plan so far; None before the first simulation.
    """

    model: StageModel
    devices: dict[int, DeviceRates]
    ps: PsCompute
    requests_left: int = 0
    best: StagePlan | None = None
    _seen: set[tuple[PlannedStage, ...]] = field(default_factory=set)
    _next: list[tuple[float, int, Iterator[_Candidate]]] = field(default_factory=list)
    _plans: list[StagePlan] = field(default_factory=list)

    def search(self, candidates: Sequence[_Candidate], requests: int) -> StagePlan:
        """Simulate candidates and their best changes, and return the fastest plan so far.

        Args:
            requests: number of micro-batch passes that may be simulated.
        """
        self.requests_left = requests
        ranked = sorted(candidates, key=lambda one: (one.rank > 0, one.seconds))
        for number, one in enumerate(ranked[:_SIMULATED]):
            if self.best is None or one.seconds <= self.best.step_s * _WORTH:
                self.simulate(one, forced=not one.rank or number < _LEAST_SIMULATED)
        while self._next and self.requests_left > 0:
            seconds, number, changes = heapq.heappop(self._next)
            some = list(islice(changes, _AT_ONCE))
            any(self.simulate(one) for one in some)
            if some:
                heapq.heappush(self._next, (seconds * _PATIENCE, number, changes))
        assert self.best is not None
        return self.best

    def simulate(self, candidate: _Candidate, *, forced: bool = False) -> bool:
        """Simulate an arrangement if the budget allows; return True if its plan is the fastest yet.

        If `forced` is set, ignore the budget.
        """
        planned, slices = candidate.climb.planned(candidate.one, 0), candidate.slices
        sliced = () if slices is None else slices.stages
        if sliced:
            planned = (*planned[:-1], replace(planned[-1], loss=False))
        key = (*planned, *sliced)
        if key in self._seen or (self.requests_left <= 0 and not forced):
            return False
        self._seen.add(key)
        self.requests_left -= round(2 * len(key) * self._weight)
        plan = predict(self.model, planned, self.devices, self.ps, sliced)
        self._plans.append(plan)
        heapq.heappush(self._next, (plan.step_s, len(self._seen), self._changes(candidate)))
        if self.best is not None and plan.step_s >= self.best.step_s * (1 - _GAIN):
            return False
        self.best = plan
        return True

    def interleave(self, requests: int) -> None:
        """Try to interleave the stages of the fastest plans.

        Args:
            requests: number of micro-batch passes that may be simulated.
        """
        assert self.best is not None
        for plan in () if self.model.cuts else self._fastest(_INTERLEAVED):
            for turns in _TURNS:
                stages = interleaved(plan.stages, turns)
                if stages is None or requests <= 0:
                    break
                requests -= round(2 * (len(stages) + len(plan.slices)) * self._weight)
                try:
                    found = predict(self.model, stages, self.devices, self.ps, plan.slices)
                except PlanError:  # the working memory of several stages does not fit
                    break
                self._plans.append(found)
                if found.step_s < self.best.step_s * (1 - _GAIN):
                    self.best = found

    def refine(self, requests: int) -> StagePlan:
        """Try unequal loss slices and a forward-first order, and return the fastest plan so far.

        Args:
            requests: number of micro-batch passes that may be simulated.
        """
        assert self.best is not None
        for plan in self._fastest(_REFINED):
            slices = balanced(self.model, plan, self.devices, self.ps)
            ways = [(plan.slices, True), *((slices, first) for first in (False, True) if slices)]
            for parts, forward_first in ways:
                if requests <= 0:
                    return self.best
                requests -= round(2 * (len(plan.stages) + len(parts)) * self._weight)
                try:
                    found = predict(
                        self.model,
                        plan.stages,
                        self.devices,
                        self.ps,
                        parts,
                        forward_first=forward_first,
                    )
                except PlanError:  # a larger slice does not fit
                    break
                if found.step_s < self.best.step_s * (1 - _GAIN):
                    self.best = found
        return self.best

    def _fastest(self, count: int) -> list[StagePlan]:
        """Return the `count` fastest plans, without plans that differ only in swapped devices."""
        distinct: dict[tuple[object, ...], StagePlan] = {}
        for plan in sorted(self._plans, key=lambda plan: plan.step_s):
            shape = tuple((stage.stop - stage.first, len(stage.devices)) for stage in plan.stages)
            distinct.setdefault((shape, len(plan.slices), f"{plan.step_s:.4g}"), plan)
            if len(distinct) == count:
                break
        return list(distinct.values())

    @property
    def _weight(self) -> float:
        """Return the cost of simulating one pass of every micro-batch, in micro-batch passes.

        The cost is higher if the PS's network card transfers messages in several pieces.
        """
        model, card = self.model, self.ps.rates or PsRates()
        if math.isinf(card.egress_bytes_per_s) and not card.byte_s:
            return len(model.tokens)
        activations = sum(model.tokens) * model.width * model.element_bytes
        return len(model.tokens) + _PIECE_REQUESTS * activations / PIECE_BYTES

    def _changes(self, candidate: _Candidate) -> Iterator[_Candidate]:
        """Yield copies of an arrangement with one change each, the best estimate first."""
        self.requests_left -= _REQUESTS_OF_CHANGES
        climb, one = candidate.climb, candidate.one
        seconds = climb.seconds_of_changes(one)[0]
        worth = float(climb.estimate(one)[0]) * _WORTH
        ranked = np.argsort(seconds, kind="stable")
        for rank, number in enumerate(ranked[seconds[ranked] < worth].tolist()):
            changed = climb.changed(one, np.array([0]), np.array([number]))
            yield replace(candidate, rank=rank, seconds=float(seconds[number]), one=changed)
