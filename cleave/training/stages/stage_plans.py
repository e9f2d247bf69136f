"""Plan a job's steps by stages, and correct the plans with measured step durations."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from torch import Tensor

from cleave.arrays import DType
from cleave.errors import DeviceMemoryError, PlanError
from cleave.fleet.fleet_runtime import FleetRuntime
from cleave.fleet.own_device import offered_bytes
from cleave.planner.forecast import FETCH_STEPS, Forecast, MethodChoice, StepForecaster
from cleave.planner.plan import DeviceRates, Method
from cleave.planner.stages.model import PsCompute, StageModel, StagePlan, StagePlanner
from cleave.planner.stages.prediction import in_seconds, predict_again, worth_changing
from cleave.planner.stages.resident import Protection, protection, worth_moving
from cleave.training.loop.methods import TilesForecaster
from cleave.training.stages.stage_work import ModelWork

# A step is planned again if its duration differs from the prediction by more than this fraction,
# and the speeds that the plan assumes have changed by at least the factor `_CHANGED`.
_OFF: Final = 0.15
_CHANGED: Final = 1.1
_STEADY: Final = 2  # number of a plan's first step that has a typical duration

_STATE_BYTES: Final = 12  # bytes per trained parameter: fp32 gradient and two AdamW moments
_OWN_DEVICE_JOINS_S: Final = 120.0  # maximum seconds to wait for the PS's computer to join


class StagePlans:
    """Plans the stages of a job's steps for the connected devices.

    The PS's own computer joins as a device if this is predicted to make steps faster.

    Args:
        ps: speed of the PS.
        dtype: dtype in which devices may compute matrix products.
        gradients: wire dtype of parameter gradients.
        tiles: forecasts the duration of a step by tiles. If tiles or the PS alone would be faster,
            `worthwhile` is False. None to always train by stages.
        waits: whether training waits when no device can train layers.
        stop: returns whether training must stop.
        say: called with messages for the user.

    Attributes:
        plan: current plan for the connected devices; None if no plan exists.
        worthwhile: whether no other method is predicted to be faster than `plan`.
        micro_batches: number of micro-batches in the plan.
        planning_s: total time spent on planning, in seconds.
        fetch_steps: number of steps between two fetches of the state on devices.
    """

    def __init__(
        self,
        runtime: FleetRuntime,
        planner: StagePlanner,
        ps: PsCompute,
        dtype: DType,
        gradients: DType,
        *,
        tiles: TilesForecaster | None,
        waits: bool,
        stop: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self.plan: StagePlan | None = None
        self.worthwhile = True
        self.micro_batches = 1
        self.planning_s = 0.0
        self.fetch_steps = FETCH_STEPS
        self._runtime = runtime
        self.planner = planner
        self._alone = ps  # the PS's speed when it does no other work
        self._ps = ps  # the PS's speed as measured in steps, without its own device
        self._dtype = dtype
        self._gradients = gradients
        self._tiles = tiles
        self._waits = waits
        self._stop = stop
        self._say = say
        self._planned_for: object = None
        self._rates: Mapping[int, DeviceRates] = {}  # device rates for which `plan` was made
        self._costs: StageModel | None = None  # cost model for which `plan` was made
        self._forecaster: StepForecaster | None = None  # forecaster used to make `plan`
        # The last plan that was discarded because speeds changed, with its cost model.
        self._former: tuple[StageModel, StagePlan] | None = None
        # The device rates in the current forecast of `plan`, and the step time in seconds that was
        # predicted when the plan was chosen.
        self._forecast_for: Mapping[int, DeviceRates] = {}
        self._chosen_s = 0.0
        self._said_s = 0.0  # the last predicted step time that was reported to the user
        self._says_from = _STEADY  # number of the first step that may report another prediction
        self._steps = 0  # number of steps since the plan was made
        self._least_steps = _STEADY  # minimum number of steps before speeds cause another plan
        self._asked_own_device = False  # whether this job has started the PS's own device
        # Factor by which the PS's work slowed its own device down in the last step.
        self._own_delay = 1.0

    def devices(self) -> dict[int, DeviceRates]:
        """Return the rates of devices that can run stages, by ID.

        The result is empty if only the PS's own device can run stages. That device measured its
        speed while the PS was idle. In a step, the PS's work slows it down, and plans account for
        that with `PsCompute.own_device`.
        """
        able, own = self._runtime.stage_devices(), self._runtime.own_devices()
        devices = {device: rates.for_graphs(self._dtype.value) for device, rates in able.items()}
        if devices.keys() <= own:
            return {}
        for device in devices.keys() & own:
            rates = devices[device]
            devices[device] = replace(rates, flops_per_s=self._own_delay * rates.flops_per_s)
        return devices

    def leave_updates(self, parameters: int) -> None:
        """Make later plans assume that devices update `parameters` parameters themselves."""
        self._ps = self._ps.without_updates_of(parameters)

    def protection(self, between_losses_s: float, between_departures_s: float) -> Protection | None:
        """Return how state on devices is protected; see `planner.stages.resident.protection`.

        Return None if the plan's devices have left, so that another plan will follow.
        """
        if self.plan is None or self._costs is None or not self.plan.devices <= self._rates.keys():
            return None
        return protection(
            self._costs, self.plan, self._rates, between_losses_s, between_departures_s
        )

    def plan_for(self, ids: Tensor, work: ModelWork) -> StagePlan | None:
        """Return the plan, renewed if devices or the batch shape changed; None if no plan is
        feasible.

        Args:
            ids: token IDs of the batch, shape (rows, tokens).

        Raises:
            DeviceMemoryError: if no plan is feasible because devices have too little memory.
        """
        devices = self.devices()
        wanted = (tuple(sorted(devices)), tuple(ids.shape))
        if self.plan is None or wanted != self._planned_for:
            self.plan, began_s = None, time.perf_counter()
            try:
                self.plan = self._new_plan(ids, work, devices)
            finally:
                self.planning_s += time.perf_counter() - began_s
            self._steps = 0
        return self.plan

    def learn(self, step_s: float, own_s: float, loss_s: float, *, stays: bool = False) -> bool:
        """Correct the speeds that plans assume, based on the duration of the last step.

        The first step with a plan is ignored, because devices receive graphs during that step. If
        devices or the PS are faster or slower than the plan assumes, its step time is predicted
        again. If the step's duration also deviates from the prediction on which the plan was based,
        and speeds have changed relative to each other, the next step is planned again.

        Args:
            step_s: duration of the whole step without planning, in seconds.
            own_s: part of `step_s` in which devices waited for the PS, in seconds.
            loss_s: time in which the PS computed losses, in seconds.
            stays: whether the next step must use the same plan unless trained state moves first.

        Returns:
            Whether trained state should move from devices to the PS, because another plan is
            predicted to be faster, and moving the state pays within `PAYS_IN_STEPS` steps.
        """
        plan, costs, before = self.plan, self._costs, self._ps
        self._steps += 1
        if plan is None or costs is None:
            return False
        self._own_delay = plan.own_delay  # the step's measured speed is lower by this factor
        if self._steps < _STEADY or self._runtime.clock != "wall":
            return False
        self._ps = replace(before, optimizer_s=own_s)
        expected_s = self._chosen_s
        off = abs(step_s / expected_s - 1) >= _OFF
        self._chosen_s += own_s - before.optimizer_s
        self.plan = replace(plan, step_s=plan.step_s - before.optimizer_s + own_s)
        devices = self.devices()
        if not plan.devices <= devices.keys():
            return False
        graphs, links = _changes(plan, self._rates, devices)
        since = [ratio for each in _changes(plan, self._forecast_for, devices) for ratio in each]
        if plan.loss_at_ps and loss_s > 0:
            loss_flops_per_s = sum(costs.tokens) * costs.loss.flops / loss_s
            faster = loss_flops_per_s / (before.loss_flops_per_s or before.flops_per_s)
            graphs.append(faster)
            since.append(faster)
            self._ps = replace(self._ps, loss_flops_per_s=loss_flops_per_s)
        alike = not _differ(graphs) and not _differ([1.0, *links])
        again = predict_again(costs, plan, devices, self._ps_with(devices))
        if off and not alike and self._steps >= self._least_steps:
            self._least_steps *= 2
            if not stays or self._moving_pays(again, devices):
                first = "; devices first return their state" if stays else ""
                self._say(
                    f"the stages are planned again: a step took {step_s:.3g} s instead of "
                    f"{expected_s:.3g} s{first}"
                )
                self.plan, self._former = (None, (costs, plan)) if not stays else (again, None)
                return stays
        if not _differ([1.0, *since]):
            return False
        self._forecast_for, self.plan = devices, again
        if off and alike:
            self._rates, self._chosen_s = devices, self.plan.step_s
        off = abs(self.plan.step_s / self._said_s - 1) >= _OFF
        if off and self._steps >= self._says_from:
            self._said_s, self._says_from = self.plan.step_s, 2 * self._steps
            now = in_seconds(self._said_s)
            self._say(f"{now} a step predicted, based on the devices' speeds in the last step")
        return False

    def _moving_pays(self, plan: StagePlan, devices: Mapping[int, DeviceRates]) -> bool:
        """Return whether trained state should move to the devices of another plan.

        Args:
            plan: the current plan with its forecast for `devices`.
        """
        assert self._costs is not None
        assert self._forecaster is not None
        rates = list(devices.values())
        try:
            found = self._forecaster.by_stages(rates, self.planner, self._ps_with(devices)).stages
        except PlanError:  # devices now offer too little memory
            return False
        assert found is not None
        return worth_moving(self._costs, plan, found[1], devices)

    def with_state_on_devices(self, ids: Tensor, work: ModelWork) -> Forecast:
        """Forecast the duration of a step by stages in which layer state stays on devices."""
        rates = self.devices()
        forecaster, devices = self._forecaster_of(ids, work), list(rates.values())
        return forecaster.with_state_on_devices(devices, self._ps_with(rates), self.fetch_steps)

    def _forecaster_of(self, ids: Tensor, work: ModelWork) -> StepForecaster:
        rows, sequence = ids.shape

        def cut(parts: int) -> StageModel:
            tokens = [len(part) * sequence for part in ids.tensor_split(parts)]
            return work.costs(tokens, sequence, self._gradients)

        return StepForecaster(cut, rows, self._alone)

    def _ps_with(self, devices: Mapping[int, DeviceRates]) -> PsCompute:
        """Return the PS's speed in a step. The PS's own device may be one of `devices`."""
        own = min(self._runtime.own_devices() & devices.keys(), default=None)
        return replace(self._ps, own_device=own)

    def _new_plan(
        self, ids: Tensor, work: ModelWork, rates: Mapping[int, DeviceRates]
    ) -> StagePlan | None:
        """Plan the stages and report the plan to the user; return None if no plan is feasible."""
        devices = list(rates.values())
        former, self._former = self._former, None
        planned_for = tuple(sorted(rates)), tuple(ids.shape)
        same, self._rates, self._planned_for = planned_for == self._planned_for, rates, planned_for
        if not devices:
            then = "training waits" if self._waits else "no stages"
            why = self._runtime.why_no_stages() or "no other computer is connected"
            self._say(f"{then}: {why}")
            return None
        began_s = time.perf_counter()
        self._forecaster = forecaster = self._forecaster_of(ids, work)
        try:
            forecast = forecaster.by_stages(devices, self.planner, self._ps_with(rates))
        except DeviceMemoryError:
            raise
        except PlanError as error:
            self._say(f"there is no plan for stages: {error}")
            return None
        assert forecast.stages is not None
        costs, plan = forecast.stages
        if self._own_device_joins(forecaster, devices, forecast.stages, work):
            return self._new_plan(ids, work, self.devices())
        if former is not None and same:
            again = predict_again(*former, rates, self._ps_with(rates))
            if not worth_changing(former[0], again, plan, rates):
                forecast = forecaster.of_plan(former[0], again)
                costs, plan = former[0], again
        self.micro_batches, self._costs = len(costs.tokens), costs
        self._forecast_for, self._chosen_s, self._said_s = rates, plan.step_s, plan.step_s
        self._says_from = _STEADY
        took_s = time.perf_counter() - began_s
        said = f"{plan.described(costs)}, planned in {took_s:.2g} s"
        if self._tiles is not None:
            others = self._tiles.forecast(forecaster), forecaster.alone()
            choice = MethodChoice(Method.AUTO, [forecast, *others])
            self.worthwhile = choice.chosen.method is Method.STAGES
            said = f"{said if self.worthwhile else 'no stages'}. {choice.why}"
        elif (alone_s := forecaster.alone().step_s) < plan.step_s:
            said += f"; this server alone is predicted to take {in_seconds(alone_s)}"
        self._say(said)
        return plan

    def _own_device_joins(
        self,
        forecaster: StepForecaster,
        devices: Sequence[DeviceRates],
        found: tuple[StageModel, StagePlan],
        work: ModelWork,
    ) -> bool:
        """Add the PS's computer as a device if that is worthwhile; return True if it has joined.

        Args:
            found: cost model and plan for `devices` alone.
        """
        own = self._runtime.own_device
        if own is None or self._asked_own_device:
            return False
        trained = sum(p.numel() for p in work.model.parameters() if p.requires_grad)
        memory_bytes = offered_bytes(_STATE_BYTES * trained)
        if not memory_bytes:
            return False
        with_s = forecaster.with_own_device(devices, found, memory_bytes, self.planner, self._ps)
        if with_s is None:
            return False
        if self._tiles is not None and with_s > forecaster.alone().step_s:
            return False
        self._say(
            f"this server also joins as a device, which can take a minute; a step is then "
            f"predicted to take {in_seconds(with_s)} instead of {in_seconds(found[1].step_s)}"
        )
        self._asked_own_device = True

        def joined() -> bool:
            return bool(self._runtime.stage_devices().keys() & self._runtime.own_devices())

        with suppress(OSError):  # if the process cannot be started, wait_until returns
            own.start(memory_bytes)
        self._runtime.wait_until(
            lambda: joined() or not own.runs or self._stop(), _OWN_DEVICE_JOINS_S
        )
        if not joined():
            own.stop()
            self._say("this server's own device did not join; run `cleave join` to see why")
        return joined()


def _differ(ratios: Sequence[float]) -> bool:
    """Return True if the largest ratio is at least `_CHANGED` times the smallest."""
    return max(ratios) >= _CHANGED * min(ratios)


def _changes(
    plan: StagePlan, before: Mapping[int, DeviceRates], now: Mapping[int, DeviceRates]
) -> tuple[list[float], list[float]]:
    """Return the new-to-old speed ratios of a plan's devices, for graphs and for links."""
    ratios = [
        [new / old for new, old in zip(_speeds(now[d]), _speeds(before[d]), strict=True)]
        for d in plan.devices
    ]
    return [each[0] for each in ratios], [ratio for each in ratios for ratio in each[1:]]


def _speeds(rates: DeviceRates) -> tuple[float, float, float]:
    return rates.flops_per_s, rates.downlink_bytes_per_s, rates.uplink_bytes_per_s
