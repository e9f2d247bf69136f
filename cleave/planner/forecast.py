"""Forecast one training step by each method and choose between the methods.

`cleave train`, `plan`, `emulate`, `simulate` and `doctor` all use this module, so these commands
choose the same method for the same fleet and batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cleave.errors import DeviceMemoryError, PlanError
from cleave.planner.local_updates import Rounds, plan_round
from cleave.planner.plan import DeviceRates, Method, StepGemm
from cleave.planner.stages.model import PsCompute, StageModel, StagePlan, StagePlanner
from cleave.planner.stages.prediction import GAIN, in_seconds, local_step_s
from cleave.planner.stages.resident import fetch_s, kept_on_devices, least_bytes, plan_resident
from cleave.planner.stages.search import plan_stages
from cleave.planner.stages.simulation import costs_of
from cleave.planner.tiles.report import StepReport

_MOST: Final = 64
_FP32_BYTES: Final = 4
_STATE_ARRAYS: Final = 4  # weights, gradients and two moments


def micro_batch_counts(rows: int, devices: int) -> list[int]:
    """Return the numbers of micro-batches to try for `rows` sequences, in ascending order."""
    few = min(rows, max(4, 2 * devices))
    return sorted({min(rows, max(1, devices)), few, min(rows, 2 * few), min(rows, _MOST)})


# Number of steps between two fetches of the state on devices, if nothing is known of the run.
FETCH_STEPS: Final = 100

_LOOPBACK_BYTES_PER_S: Final = 1e9

# The PS's computer also serves as a device if this shortens a step by at least both amounts.
_OWN_DEVICE_SAVES_S: Final = 1.0
_OWN_DEVICE_SAVES: Final = 0.05
_FEW_DEVICES: Final = 64  # in a larger fleet, one more device changes little


def plan_batch(
    planner: StagePlanner,
    cut: Callable[[int], StageModel],
    rows: int,
    devices: Sequence[DeviceRates],
    ps: PsCompute,
    in_parts: Callable[[int], StageModel] | None = None,
) -> tuple[StageModel, StagePlan]:
    """Return the model and its stage plan for the fastest number of micro-batches.

    Args:
        cut: returns the model with the `rows` sequences divided into a given number of
            micro-batches.
        in_parts: like `cut`, but divides each layer into attention and MLP. It is used only if the
            devices have too little memory for whole layers.

    Raises:
        DeviceMemoryError: if the devices have too little memory for stages.
        PlanError: if no number of micro-batches allows stages on these devices.
    """
    best: tuple[StageModel, StagePlan] | None = None
    refused: PlanError | None = None
    # Many micro-batches are usually fastest, so the largest number is tried first. Of two equally
    # fast numbers, the smaller is chosen.
    for count in reversed(micro_batch_counts(rows, len(devices)) if rows > 0 else ()):
        try:
            model = cut(count)
            plan = planner(model, devices, ps)
        except PlanError as error:
            refused = refused or error
            continue
        if best is None or plan.step_s <= best[1].step_s:
            best = model, plan
    if best is not None:
        return best
    if in_parts is not None and isinstance(refused, DeviceMemoryError):
        return plan_batch(planner, in_parts, rows, devices, ps)
    raise refused or PlanError(f"a batch needs at least one sequence, but has {rows}")


# The exact methods, in ascending order of traffic. AUTO chooses the fastest. If several are equally
# fast, it chooses the first of these.
_BY_TRAFFIC: Final = (Method.LOCAL, Method.STAGES, Method.TILES)
_NAMES: Final = {
    Method.STAGES: "stages",
    Method.TILES: "tiles",
    Method.LOCAL: "the server alone",
}
_BY: Final = {
    Method.STAGES: "by stages",
    Method.TILES: "by tiles",
    Method.LOCAL: "on the server alone",
}


@dataclass(frozen=True, slots=True)
class Forecast:
    """The predicted time, traffic and memory of one training step by one method.

    Attributes:
        step_s: predicted time of the step in seconds; infinite if the method is impossible.
        downlink_bytes, uplink_bytes: traffic of all devices together.
        bottleneck: a clause that names what takes most of the time.
        device_bytes: memory that the device with the largest requirement needs.
        server_bytes: memory of the PS for parameters, gradients, optimizer state and activations.
        refused: why the method is impossible, as shown to the user; empty if it is possible.
        stages: the model and its plan for `Method.STAGES`; None for other methods.
        tiles: the plans of all matrix multiplications for `Method.TILES`; otherwise None.
    """

    method: Method
    step_s: float
    downlink_bytes: int = 0
    uplink_bytes: int = 0
    bottleneck: str = ""
    device_bytes: int = 0
    server_bytes: int = 0
    refused: str = ""
    stages: tuple[StageModel, StagePlan] | None = None
    tiles: StepReport | None = None


def refused(method: Method, reason: str) -> Forecast:
    """Return the forecast of an impossible method, with an infinite step time."""
    return Forecast(method, float("inf"), refused=reason)


ON_SERVER: Final = "weights and optimizer state stay on the server"


def choose_state(usual: Forecast, resident: Forecast) -> tuple[bool, str]:
    """Choose where the layers' state is stored between steps by stages (`--state auto`).

    Args:
        usual, resident: forecasts of a step with the state on the server, and on devices.

    Returns:
        Whether the state stays on devices, and a clause that states the reason.
    """
    if resident.step_s < usual.step_s:
        where, chosen, other = "weights and optimizer state stay on devices", resident, usual
    else:
        where, chosen, other = ON_SERVER, usual, resident
    if chosen.refused or other.refused:
        return chosen is resident, f"{where}: {chosen.refused or other.refused}"
    return chosen is resident, (
        f"{where}: a step is predicted to take {in_seconds(chosen.step_s)} instead of "
        f"{in_seconds(other.step_s)}"
    )


@dataclass(frozen=True, slots=True)
class StepForecaster:
    """Forecasts training steps of one model with a fixed batch size.

    Attributes:
        cut: returns the model for a given number of micro-batches.
        in_parts: like `cut`, but divides each layer into attention and MLP; None if impossible.
        state_bytes: memory of parameters, gradients and optimizer state on the PS; 0 if unknown.
        kept_bytes: activation bytes per token, over all layers, that the PS retains for its own
            backward pass; 0 if unknown.

    Example:
        >>> forecaster = StageSizes(find_model("opt-125m"), 512).forecaster(64, ps)
        >>> forecaster.by_stages(devices).step_s
    """

    cut: Callable[[int], StageModel]
    rows: int
    ps: PsCompute
    state_bytes: int = 0
    kept_bytes: int = 0
    in_parts: Callable[[int], StageModel] | None = None

    def alone(self) -> Forecast:
        """Forecast a step that the PS computes alone, with the whole batch as one micro-batch."""
        return Forecast(
            Method.LOCAL,
            local_step_s(self.cut(1), self.ps),
            bottleneck="the server's own computation takes the whole step",
            server_bytes=self._bytes_alone(),
        )

    def by_tiles(self, step: StepReport, gemms: Sequence[StepGemm]) -> Forecast:
        """Forecast a step in which devices compute every GEMM that they finish faster than the PS.

        The predicted time is the step time of the PS alone minus the time that the devices save. It
        is at least the sum, over all GEMMs, of the shorter of the PS's time and the devices' time.
        `gemms` are in the order of `step.reports`.
        """
        ps_s = [each.gemm.flops / self.ps.flops_per_s for each in gemms]
        fleet_s = [report.predicted_s for report in step.reports]
        sent = [n for n in range(len(gemms)) if fleet_s[n] < ps_s[n]]
        saved_s = least_s = 0.0
        held_bytes = 0
        for each in step.submissions:
            count = gemms[each.places[0]].count
            # If every multiplication of a submission is sent, the submission is timed as a whole.
            together = set(each.places) <= set(sent)
            groups = [each.places] if together else [(n,) for n in each.places]
            for places in groups:
                here_s = sum(ps_s[n] for n in places)
                there_s = each.seconds if together else fleet_s[places[0]]
                saved_s += count * max(0.0, here_s - there_s)
                least_s += count * min(here_s, there_s)
            held_bytes += each.held_bytes * count * together
        plans = [(step.reports[n], gemms[n].count) for n in sent]
        return Forecast(
            Method.TILES,
            max(local_step_s(self.cut(1), self.ps) - saved_s, least_s),
            sum(report.plan.egress_bytes * count for report, count in plans) - held_bytes,
            sum(report.plan.ingress_bytes * count for report, count in plans),
            _bottleneck_of_tiles(step, gemms, sent),
            max((report.memory_bytes for report, _ in plans), default=0),
            self._bytes_alone(),
            tiles=step,
        )

    def by_stages(
        self,
        devices: Sequence[DeviceRates],
        planner: StagePlanner = plan_stages,
        ps: PsCompute | None = None,
    ) -> Forecast:
        """Forecast a step by stages, with the fastest number of micro-batches.

        Args:
            ps: speed of the PS in this step; `self.ps` by default.

        Raises:
            DeviceMemoryError: if the devices have too little memory.
            PlanError: if the model cannot be divided into stages for these devices.
        """
        found = plan_batch(planner, self.cut, self.rows, devices, ps or self.ps, self.in_parts)
        return self.of_plan(*found)

    def with_state_on_devices(
        self,
        devices: Sequence[DeviceRates],
        ps: PsCompute | None = None,
        fetch_steps: int = FETCH_STEPS,
    ) -> Forecast:
        """Forecast a step by stages in which the layers' state stays on devices.

        The state of the LM head is on a device, too, if steps are then faster, and save more time
        than a fetch of all state takes longer.

        If this method is impossible, `Forecast.refused` gives the reason. The PS's memory excludes
        the layers' state, because the PS moves this state to files if memory is short.

        Args:
            ps: speed of the PS in this step; `self.ps` by default.
            fetch_steps: number of steps between two fetches of all state.
        """
        model, ps = self.cut(1), ps or self.ps

        def of(*, head: bool) -> Forecast:
            kept = kept_on_devices(model, head=head)
            costs = [*kept.layers, *([kept.loss] if head else [])]
            trained = sum(cost.sum_bytes for cost in costs)
            resident = replace(
                self,
                cut=lambda parts: kept_on_devices(self.cut(parts), head=head),
                state_bytes=max(0, self.state_bytes - _STATE_ARRAYS * trained),
                in_parts=None,
            )
            after = ps.without_updates_of(trained / _FP32_BYTES)
            try:
                return resident.by_stages(devices, plan_resident, after)
            except PlanError as error:
                return refused(Method.STAGES, str(error))

        found = of(head=False)
        if model.head_may_move:
            with_head = of(head=True)
            saved_s = found.step_s - with_head.step_s
            longer_s = 0.0
            if found.stages is not None and with_head.stages is not None:
                by_id = {device.device: device for device in devices}
                longer_s = fetch_s(*with_head.stages, by_id) - fetch_s(*found.stages, by_id)
            if saved_s >= max(GAIN * found.step_s, longer_s / fetch_steps):
                found = with_head
        if found.refused:
            return found
        assert found.stages is not None
        least = least_bytes(found.stages[0])
        if not (small := sum(device.memory_bytes < least for device in devices)):
            return found
        who = "1 device has" if small == 1 else f"{small} devices have"
        left = f"{who} too little memory for even one layer ({least / 1e6:.0f} MB)"
        return replace(found, bottleneck=f"{found.bottleneck}; {left}")

    def by_local_updates(
        self, devices: Sequence[DeviceRates], elements: int, rounds: Rounds
    ) -> Forecast:
        """Forecast local updates, with time and traffic scaled to the tokens of one step.

        Local updates are a different algorithm, so their losses differ. In a local step, each
        device trains on an equal share of the sequences, one sequence per micro-batch. If local
        updates are impossible, `Forecast.refused` gives the reason.

        Args:
            elements: number of trained parameters.
        """
        model, each = self.cut(self.rows), -(-self.rows // max(1, len(devices)))
        try:
            plan = plan_round(model, elements, devices, self.ps.rates, rounds, each)
        except PlanError as error:
            return refused(Method.DILOCO, str(error))
        share = sum(model.tokens) / plan.tokens
        return Forecast(
            Method.DILOCO,
            plan.round_s * share,
            round(plan.downlink_bytes * share),
            round(plan.uplink_bytes * share),
            plan.why,
            plan.device_bytes,
            plan.server_bytes,
        )

    def of_plan(self, model: StageModel, plan: StagePlan) -> Forecast:
        """Return the forecast of a step by stages that follows `plan`."""
        return Forecast(
            Method.STAGES,
            plan.step_s,
            plan.downlink_bytes,
            plan.uplink_bytes,
            plan.reason,
            max(plan.memory_bytes.values(), default=0),
            self.state_bytes + kept_by_server(model, plan),
            stages=(model, plan),
        )

    def with_own_device(
        self,
        devices: Sequence[DeviceRates],
        found: tuple[StageModel, StagePlan],
        memory_bytes: int,
        planner: StagePlanner = plan_stages,
        ps: PsCompute | None = None,
    ) -> float | None:
        """Return the step time by stages, in seconds, with the PS's computer as one more device.

        Args:
            found: the model, and its plan for `devices` alone.
            ps: speed of the PS in a step without its own device; `self.ps` by default.

        Returns:
            The step time; None if the additional device is not worthwhile.
        """
        if len(devices) > _FEW_DEVICES:
            return None
        number = 1 + max(device.device for device in devices)
        speed, link = self.ps.graph_flops_per_s or self.ps.flops_per_s, _LOOPBACK_BYTES_PER_S
        own = DeviceRates(number, link, link, speed, memory_bytes=memory_bytes)
        model, plan = found
        step_s, beside = plan.step_s, replace(ps or self.ps, own_device=number)
        with_s = planner(model, [*devices, own], beside).step_s
        least_s = max(_OWN_DEVICE_SAVES_S, _OWN_DEVICE_SAVES * step_s)
        return with_s if step_s - with_s >= least_s else None

    def _bytes_alone(self) -> int:
        model = self.cut(1)
        of_loss = round(model.loss.working_bytes)
        return self.state_bytes + sum(model.tokens) * (self.kept_bytes + of_loss)


def _bottleneck_of_tiles(step: StepReport, gemms: Sequence[StepGemm], sent: Sequence[int]) -> str:
    """Return a clause that names the main bottleneck of the GEMMs with the indices `sent`."""
    many = sum(each.count for each in gemms)
    if not sent:
        return f"the server finishes all {many} multiplications faster than the fleet"
    by_limit: dict[str, float] = {}
    for n in sent:
        report = step.reports[n]
        limit = report.bottleneck.value
        by_limit[limit] = by_limit.get(limit, 0.0) + report.predicted_s * gemms[n].count
    worst = max(by_limit, key=lambda limit: by_limit[limit])
    few = sum(gemms[n].count for n in sent)
    which = f"{few} of {many}" if few < many else f"{many}"
    return f"{worst} limits most of the {which} multiplications that devices compute"


def kept_by_server(model: StageModel, plan: StagePlan) -> int:
    """Return the memory that the PS needs for the data of a step by stages, in bytes.

    The data consists of the stages' inputs and output gradients, the devices' weight gradients, the
    input gradients from the loss slices, and working memory for one micro-batch's loss.
    """
    arrays = 2 * len(plan.stages) + len(plan.slices) + (0 if plan.stages[-1].loss else 2)
    kept = arrays * sum(model.tokens) * model.width * model.element_bytes
    for stage in plan.planned:
        costs = costs_of(model, stage)
        kept += len(stage.devices) * sum(cost.gradient_bytes for cost in costs)
    if plan.loss_at_ps:
        kept += round(max(model.tokens) * model.loss.working_bytes)
    return kept


@dataclass(frozen=True, slots=True)
class MethodChoice:
    """Forecasts of a step by several methods. `chosen` selects one of them.

    Attributes:
        forecasts: one forecast for each method considered, including `asked` unless it is AUTO.
    """

    asked: Method
    forecasts: Sequence[Forecast]

    @property
    def exact(self) -> list[Forecast]:
        """Return the forecasts of the exact methods. AUTO chooses one of these methods."""
        return [each for each in self.forecasts if each.method in _BY_TRAFFIC]

    @property
    def chosen(self) -> Forecast:
        """Return the forecast of the requested method, or of the fastest method for AUTO.

        Raises:
            PlanError: if the user requested a method that is impossible.
        """
        found = self.considered
        if found.refused and self.asked is not Method.AUTO:
            raise PlanError(f"--method {self.asked.value} is refused: {found.refused}")
        return found

    @property
    def considered(self) -> Forecast:
        """Return the same forecast as `chosen`, even if the requested method is impossible."""
        if self.asked is not Method.AUTO:
            return next(each for each in self.forecasts if each.method is self.asked)
        order = sorted(self.exact, key=lambda each: _BY_TRAFFIC.index(each.method))
        return min(order, key=lambda each: each.step_s)

    @property
    def stages(self) -> tuple[StageModel, StagePlan] | None:
        """Return the model and plan of the forecast by stages; None if stages are impossible."""
        return next((each.stages for each in self.forecasts if each.stages is not None), None)

    @property
    def tiles(self) -> StepReport | None:
        """Return the plans of all matrix multiplications; None if there is no plan by tiles."""
        return next((each.tiles for each in self.forecasts if each.tiles is not None), None)

    @property
    def why(self) -> str:
        """Return a sentence that names the chosen method and the reason for the choice."""
        chosen = self.chosen
        if self.asked is not Method.AUTO:
            return f"Using {chosen.method.value}, as requested."
        possible = [e for e in self.exact if not e.refused and e is not chosen]
        name = _NAMES[chosen.method]
        if not possible:
            return f"Using {name}: no other method is possible."
        others = " and ".join(f"{in_seconds(e.step_s)} {_BY[e.method]}" for e in possible)
        least = min(each.step_s for each in possible)
        tie = (
            "; of methods with the same step time, it sends the least"
            if least <= chosen.step_s
            else ""
        )
        takes = in_seconds(chosen.step_s)
        return f"Using {name}: a step takes {takes}, compared with {others}{tie}."


# The search ends when `above` divided by `below` (see `Crossing`), in sequences, is at most this.
CLOSE: Final = 1.1


@dataclass(frozen=True, slots=True)
class CrossingPoint:
    """Predicted step times for one batch size.

    Attributes:
        stages_s: step time in seconds by stages; infinite if no plan exists.
        local_s: step time in seconds on the PS alone.
    """

    rows: int
    stages_s: float
    local_s: float

    @property
    def wins(self) -> bool:
        """Return True if stages are faster than the PS alone for this batch."""
        return self.stages_s < self.local_s


@dataclass(frozen=True, slots=True)
class Crossing:
    """Two batch sizes between which stages become faster than the PS alone.

    Attributes:
        points: the batches that were tried, in ascending order of batch size.
        below: the largest batch tried for which stages do not win; None if stages always win.
        above: the smallest batch tried for which stages win; None if stages never win.
    """

    points: tuple[CrossingPoint, ...]
    below: CrossingPoint | None
    above: CrossingPoint | None


def crossing(
    predict: Callable[[int], CrossingPoint],
    most_rows: int,
    tried: Callable[[CrossingPoint], None] = lambda point: None,
) -> Crossing:
    """Search for the smallest batch of at most `most_rows` sequences for which stages win.

    The search doubles the batch size until stages win, and then bisects. It assumes that stages
    also win for every larger batch, because weights and gradients are transferred once per step.
    `predict` returns the step times of a batch. `tried` is called with each result of `predict`.
    """
    points: dict[int, CrossingPoint] = {}

    def at(rows: int) -> CrossingPoint:
        points[rows] = predict(rows)
        tried(points[rows])
        return points[rows]

    below, above, rows = None, None, 1
    while above is None:
        point = at(rows)
        if point.wins:
            above = point
        else:
            below = point
            if rows == most_rows:
                break
            rows = min(2 * rows, most_rows)
    while above is not None and below is not None and not _close(below.rows, above.rows):
        point = at(round((below.rows * above.rows) ** 0.5))
        below, above = (below, point) if point.wins else (point, above)
    return Crossing(tuple(points[rows] for rows in sorted(points)), below, above)


def most_points(most_rows: int) -> int:
    """Return the maximum number of batch sizes that `crossing` tries, given `most_rows`."""
    return (most_rows - 1).bit_length() + 1 + 4


def _close(below: int, above: int) -> bool:
    return above - below <= 1 or above <= CLOSE * below
