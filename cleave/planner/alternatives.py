"""Stages, tiles and the PS alone for one step, side by side: what each takes, and which is best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cleave.errors import PlanError
from cleave.planner.methods import CountedTimes, Method, Prediction, tiles_step_s
from cleave.planner.micro_batches import plan_batch
from cleave.planner.plan import DeviceRates
from cleave.planner.report import CountedGemm, StepReport
from cleave.planner.stage_events import costs_of
from cleave.planner.stage_prediction import in_seconds, local_step_s
from cleave.planner.stages import PsCompute, StageModel, StagePlan, StagePlanner, StagePlannerWithin

_NEVER_S: Final = float("inf")


@dataclass(frozen=True, slots=True)
class Alternative:
    """What a step by one method is predicted to take.

    Attributes:
        method: which.
        step_s: seconds; infinite where it is refused.
        downlink_bytes, uplink_bytes: of all devices together.
        bound_by: what makes most of the time, in a sentence without its full stop.
        device_bytes: memory of the device that needs most.
        server_bytes: memory of the PS: parameters, their gradients and the optimizer's moments, and
            what it keeps of the batch.
        refused: why it is not possible; empty if it is.
    """

    method: Method
    step_s: float
    downlink_bytes: int = 0
    uplink_bytes: int = 0
    bound_by: str = ""
    device_bytes: int = 0
    server_bytes: int = 0
    refused: str = ""


def refused(method: Method, reason: str) -> Alternative:
    """Return a method that is not possible."""
    return Alternative(method, _NEVER_S, refused=reason)


@dataclass(frozen=True, slots=True)
class Batch:
    """A model and a batch, whatever the method.

    Attributes:
        cut: returns the model with the batch cut into so many micro-batches.
        rows: sequences of the batch.
        state_bytes: parameters, gradients and moments on the PS.
        kept_bytes: of activations for each token, if the PS does the backward pass itself.
        in_parts: as `cut`, with layers in parts.
    """

    cut: Callable[[int], StageModel]
    rows: int
    state_bytes: int
    kept_bytes: int
    in_parts: Callable[[int], StageModel] | None = None

    def by_ps(self, ps: PsCompute) -> Alternative:
        """Return what the PS takes alone, with the whole batch at once."""
        return Alternative(
            Method.LOCAL,
            local_step_s(self.cut(1), ps),
            bound_by="the server's own arithmetic takes all of it",
            server_bytes=self._bytes_of_all(),
        )

    def by_tiles(
        self, step: StepReport, gemms: Sequence[CountedGemm], ps: PsCompute
    ) -> Alternative:
        """Return what tiles take, as `--offload auto` sends them: what is sooner here stays here.

        Args:
            step: the plans of all multiplications.
            gemms: the same multiplications.
            ps: the PS.
        """
        times = [
            CountedTimes(found.predicted_s, each.gemm.flops / ps.flops_per_s, each.count)
            for each, found in zip(gemms, step.reports, strict=True)
        ]
        sent = [n for n, each in enumerate(times) if each.fleet_s < each.ps_s]
        submitted, held_bytes = list[CountedTimes](), 0
        for each in step.submissions:
            own = [times[n] for n in each.places]
            if set(each.places) <= set(sent):
                here_s, count = sum(one.ps_s for one in own), own[0].count
                own = [CountedTimes(each.seconds, here_s, count)]
                held_bytes += each.held_bytes * count
            submitted += own
        plans = [(step.reports[n], gemms[n].count) for n in sent]
        many, few = sum(each.count for each in times), sum(times[n].count for n in sent)
        bound_by = f"the server does all {many} multiplications sooner itself"
        if sent:
            by_limit: dict[str, float] = {}
            for report, count in plans:
                limit = report.bottleneck.value
                by_limit[limit] = by_limit.get(limit, 0.0) + report.predicted_s * count
            worst = max(by_limit, key=lambda limit: by_limit[limit])
            which = f"{few} multiplications of {many} that are sent"
            if few == many:
                which = f"{many} multiplications, all of which are sent"
            bound_by = f"{worst} limits most of the {which}"
        return Alternative(
            Method.TILES,
            tiles_step_s(local_step_s(self.cut(1), ps), submitted),
            sum(report.plan.egress_bytes * count for report, count in plans) - held_bytes,
            sum(report.plan.ingress_bytes * count for report, count in plans),
            bound_by,
            max((report.memory_bytes for report, _ in plans), default=0),
            self._bytes_of_all(),
        )

    def by_stages(
        self,
        planner: StagePlanner,
        devices: Sequence[DeviceRates],
        ps: PsCompute,
        within: StagePlannerWithin | None = None,
    ) -> tuple[Alternative, StageModel, StagePlan]:
        """Return what stages take, the batch as it is best cut, and the plan; see `plan_batch`.

        Raises:
            PlanError: when no stages fit these devices.
        """
        model, plan = plan_batch(planner, self.cut, self.rows, devices, ps, self.in_parts, within)
        found = Alternative(
            Method.STAGES,
            plan.step_s,
            plan.downlink_bytes,
            plan.uplink_bytes,
            plan.reason,
            max(plan.memory_bytes.values()),
            self.state_bytes + kept_by_server(model, plan),
        )
        return found, model, plan

    def _bytes_of_all(self) -> int:
        model = self.cut(1)
        of_loss = round(model.loss.working_bytes)
        return self.state_bytes + sum(model.tokens) * (self.kept_bytes + of_loss)


def kept_by_server(model: StageModel, plan: StagePlan) -> int:
    """Return the bytes that the PS keeps until a step by stages ends.

    They are what goes into every stage and the gradient of what comes out, the sums of gradients of
    every device, the gradients of every slice of the loss, and the loss of one micro-batch where
    the PS computes it.
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
class Comparison:
    """Methods side by side.

    Attributes:
        alternatives: those that were weighed.
        method: the method that was asked for.
    """

    alternatives: Sequence[Alternative]
    method: Method

    @property
    def chosen(self) -> Alternative:
        """Return the method that was asked for, or the fastest.

        Raises:
            PlanError: when what was asked for is refused.
        """
        by_method = {each.method: each for each in self.alternatives}
        if self.method is Method.AUTO:
            return by_method[self._prediction().best]
        found = by_method[self.method]
        if found.refused:
            raise PlanError(f"--method {self.method.value} is refused: {found.refused}")
        return found

    @property
    def weighed(self) -> Alternative:
        """Return the method that was asked for, also where it is refused, or the fastest."""
        asked = [each for each in self.alternatives if each.method is self.method]
        return asked[0] if asked else self.chosen

    @property
    def why(self) -> str:
        """Say in a sentence which method is chosen and why."""
        chosen = self.chosen
        if self.method is not Method.AUTO:
            return f"Chosen is {chosen.method.value}, which was asked for."
        possible = [e for e in self.alternatives if not e.refused and e is not chosen]
        name = _NAMES[chosen.method]
        if not possible:
            return f"Chosen is {name}: nothing else is possible."
        others = " and ".join(f"{in_seconds(e.step_s)} {_BY[e.method]}" for e in possible)
        least = min(each.step_s for each in possible)
        tie = "; of equally fast ones, the one that sends least" if least <= chosen.step_s else ""
        takes = in_seconds(chosen.step_s)
        return f"Chosen is {name}: a step takes {takes}, against {others}{tie}."

    def _prediction(self) -> Prediction:
        seconds = {each.method: each.step_s for each in self.alternatives}
        methods = (Method.STAGES, Method.TILES, Method.LOCAL)
        return Prediction(*(seconds.get(method, _NEVER_S) for method in methods))


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
