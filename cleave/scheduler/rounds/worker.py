"""Request local steps, and then the differences of the weights, from one device.

The device never overwrites a weight or moment. `DeviceArrays._snapshot` keeps the server's weights,
from which differences are computed. If the device has enough memory, it also keeps the moments from
the beginning of the round. Training can then stop during a round and later repeat the round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from cleave import graph_names as names
from cleave.planner.stages.model import Keep, PlannedStage
from cleave.scheduler.rounds.work import DeviceKey, LocalModel, MicroBatch, RoundPart, RoundWork
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.device import StageDevice
from cleave.scheduler.stages.device_arrays import row_pieces
from cleave.scheduler.stages.work import (
    EmbeddingWork,
    RequestKind,
    StageGraph,
    StageOrder,
    StageRequest,
    SumName,
)
from cleave.scheduler.tiles.device_memory import Names

_FP32: Final = 4
_STEPS_IN_FLIGHT: Final = 2  # so that a device need not wait for the next step


class LocalWorker(StageDevice):
    """Tracks one device's work in rounds, and queues its messages.

    Attributes:
        round: number of the last round that the device began.
        updates: number of updates in the device's optimizer moments.
        began: number of updates in the moments when the round began.
        late: whether the moments began after the first round of the run. Before the first update
            of such moments, the second are estimated from the first gradient. With zeros, the first
            steps would be large, because AdamW divides a gradient by its own size.
        steps: the local steps of this round that have not been requested.
        pending: the requests of local steps that the device has not finished.
        done: the requests of finished local steps.
        difference: the request for the difference; None if local steps are unfinished.
        compute_s: computation time of the local steps in seconds, as reported by the device.
        tokens: number of tokens in all requested local steps.
    """

    def __init__(
        self,
        device: int,
        device_key: DeviceKey,
        ids: Names,
        model: LocalModel,
        memory_bytes: int,
    ) -> None:
        super().__init__(device, ids, model.step)
        self.device_key = device_key
        self.name, self.identity = device_key
        self.model = model
        self.memory_bytes = memory_bytes
        self.round = self.updates = self.began = 0
        self.late = False
        self.steps: deque[Sequence[MicroBatch]] = deque()
        self.pending: list[StageRequest] = []
        self.done: list[StageRequest] = []
        self.difference: StageRequest | None = None
        self.compute_s = 0.0
        self.tokens = 0
        self._due: Mapping[SumName, Mapping[str, StageArray]] = {}  # updates to be added to weights
        # For each parameter, its moments and its error, which is the unreturned part of
        # differences.
        self._inner: dict[SumName, dict[str, StageArray]] = {}
        for key, one in self._resident.parameters.items():
            self._inner[key] = {names.moment(n): each for n, each in enumerate(one.moments)}
            if model.exchange[key].keeps_error:
                self._inner[key][names.ERROR] = replace(one.weight, payload=b"")
        inner_bytes = sum(
            len(self._inner[key]) * one.weight.nbytes
            for key, one in self._resident.parameters.items()
        )
        needed_bytes = model.held_bytes + model.working_bytes + model.activations_bytes
        self._keeps_inner = needed_bytes + inner_bytes <= memory_bytes
        self._plan = PlannedStage(0, len(model.step.layers), (device,), loss=True)

    def begin(self, work: RoundWork) -> None:
        """Prepare the device's local steps, and send all arrays if the device lacks them."""
        self._due = {}
        if self.round and self.round == work.number - 1:
            self._due = work.updates
        else:
            self._load(work)
        self._keep_inner()
        self.round, self.steps = work.number, deque(work.steps[self.device])
        self.pending, self.done, self.difference = [], [], None
        self.compute_s, self.tokens = 0.0, 0

    def _load(self, work: RoundWork) -> None:
        """Send the weights and all other arrays. The device fills new moments with zeros."""
        self.end_snapshot()
        self.start_over()
        states = work.states.get(self.device_key)
        state = states.pop(0) if states else None
        self._updates = dict.fromkeys(self._resident.arrays, 0)
        self.updates = state.updates if state is not None else 0
        self.late = state.late if state is not None else work.number > 1
        model, step, weights = self.model, self.work, work.weights
        request = self._request(RequestKind.LOCAL)
        for key, one in self._resident.parameters.items():
            self._put(weights[key])
            self._sent[one.weight] = self._snapshot[one.weight] = self._sent.pop(weights[key])
            for name, array in self._inner[key].items():
                if state is None:
                    self._sent[array] = self._zeros(request, one.weight)
                else:
                    given = state.arrays[key][name]
                    self._put(given)
                    self._sent[array] = self._sent.pop(given)
        assert step.loss is not None
        for layer in step.layers:
            self.load([*layer.parameters.values(), *layer.extras.values()])
        self.load([*model.embedding.parameters.values(), *step.loss.parameters.values()])

    def _zeros(self, request: StageRequest, weight: StageArray) -> int:
        """Request zeros in the shape of a weight. Return their wire ID."""
        feed, made = {names.WEIGHT: self._sent[weight]}, {names.MOMENT: weight.nbytes}
        return self._run(request, self.model.zeros, feed, made, 0)[names.MOMENT]

    def _keep_inner(self) -> None:
        """Keep the present moments until the next round begins, if the device has the memory."""
        self.began = self.updates
        for arrays in self._inner.values():
            for array in arrays.values():
                now = self._sent[array]
                if self._snapshot.get(array, now) != now:
                    self.drop([self._snapshot[array]])
                if self._keeps_inner:
                    self._snapshot[array] = now

    def collect(self, dtype: str, *, undone: bool) -> bool:
        """Request the moments from the end of the last round.

        Args:
            undone: whether to undo this round, because it did not end on all devices. The moments
                are then from its beginning, and the device must start over with `begin`.

        Returns:
            Whether the device still has these moments. If so, `part` returns them once they arrive.
        """
        if undone:
            if not self._keeps_inner or not self.round:
                return False
            self.start_over()
            self.round, self.updates = 0, self.began
            self._due, self.pending = {}, []
            self.steps.clear()
        held = self._sent if self.round else self._snapshot
        self.difference = request = self._request(RequestKind.DIFFERENCE)
        for key, one in self._resident.parameters.items():
            rows, columns = one.weight.rows, one.weight.columns
            for name, array in self._inner[key].items():
                request.rest += row_pieces((*key, name), held[array], rows, columns, dtype)
        self.more_rows(request)
        return True

    def _add(self, key: SumName, update: Mapping[str, StageArray]) -> None:
        """Add the server's update to a weight, and mix the device's own weight into the result."""
        weight = self._resident.parameters[key].weight
        before, now = self._snapshot.pop(weight), self._sent.pop(weight)
        feed = {names.START: before} | self._put_all(update)
        out, request = names.updated(names.WEIGHT), self._request(RequestKind.LOCAL)
        made, graph = {out: weight.nbytes}, self.model.exchange[key].added
        start = mixed = self._run(request, graph, feed, made, 0)[out]
        if self.model.mixed is not None:
            feed = {names.START: start, names.WEIGHT: now}
            mixed = self._run(request, self.model.mixed, feed, made, 0)[out]
        self.drop([before, now])
        for array in update.values():
            self._forget(array)
        self._snapshot[weight], self._sent[weight] = start, mixed

    def _request(self, kind: RequestKind) -> StageRequest:
        number = len(self.done) + len(self.pending)
        return StageRequest(kind, 0, self._plan, number, self.device)

    def arrived(self, order: StageOrder, run: int, payload: Any, compute_s: float) -> None:
        """Record the answer to a task. `payload` is None if the task ran a graph."""
        request = order.request
        request.answers.pop(run, None)
        self.answered(run)
        if order.name is not None:
            request.found[order.name] = payload
        if request.kind is RequestKind.LOCAL:
            self.compute_s += compute_s
        if not request.answers and request in self.pending:
            self.pending.remove(request)
            self.done.append(request)

    def more(self, work: RoundWork) -> None:
        """Request the next local steps, or the difference.

        Steps that overlap with an exchange are all requested at once, before the update is sent or
        after the difference is requested. The device is then never idle during the transfer.
        """
        last = max(0, min(work.overlap[1], len(work.steps[self.device]) - 1))
        if self._due:
            for _ in range(min(work.overlap[0], len(self.steps) - last - 1)):
                self._step(self.steps.popleft(), work)
            for key, update in self._due.items():
                self._add(key, update)
            self._due = {}
        while len(self.steps) > last and len(self.pending) < _STEPS_IN_FLIGHT:
            self._step(self.steps.popleft(), work)
        if self.difference is not None:
            self.more_rows(self.difference)
        elif self.steps and len(self.steps) == last:
            request = self._difference(work)
            while request.rest:
                self._next_rows(request)
            while self.steps:
                self._step(self.steps.popleft(), work)
        elif not self.steps and not self.pending:
            self.more_rows(self._difference(work))

    def _step(self, batches: Sequence[MicroBatch], work: RoundWork) -> None:
        request = self._request(RequestKind.LOCAL)
        self.pending.append(request)
        room = self.memory_bytes - self.occupied_bytes - self.model.working_bytes
        request.keep = Keep.INPUTS
        if self.model.activations_bytes < room:
            request.keep = Keep.ACTIVATIONS
        for number, batch in enumerate(batches):
            self._pass(request, batch, number)
            self.tokens += batch.tokens
        scalars = work.scalars(request.batch, self.updates, self.late)
        given = [self._put(each) for each in scalars]
        estimate = self.model.estimate if self.late and not self.updates else None
        if self.model.clip is not None:
            given = self._clipped(request, given, scalars)
        # Update the largest parameter last, when all other gradients have been dropped.
        for key, gradient in sorted(request.sums.items(), key=lambda each: self._sizes[each[1]]):
            if estimate is not None:
                self._estimate(request, key, estimate, gradient, given[0])
            request.sums = {key: gradient}
            self.update_with(request, given)
        for each in scalars:
            if each in self._sent:
                self._forget(each)
        self.drop([id for id in given if id in self._sizes])
        self.updates += 1

    def _pass(self, request: StageRequest, batch: MicroBatch, number: int) -> None:
        """Request the forward and backward pass of a micro-batch. Only the loss is returned."""
        x = self._embedded(request, batch.ids, batch.tokens)
        y, kept = self._forward(request, request.layers, x, batch.tokens)
        given = {names.TARGETS: batch.targets, names.SCALE: batch.scale}
        loss, dy = self._loss(request, y, batch.tokens, given)
        self._fetch(request, (names.LOSS, number), loss, 0, 1, 1, "fp32")
        self.drop([y, loss])
        dx = self._through(request, kept, dy, batch.tokens)
        self._add_embedding(request, batch.ids, dx)
        self.drop([dx])

    @property
    def _embedding(self) -> EmbeddingWork:
        return self.model.embedding

    def _clipped(
        self, request: StageRequest, given: Sequence[int], scalars: Sequence[StageArray]
    ) -> list[int]:
        """Request coefficients that also clip the gradients by their norm. Return wire IDs."""
        assert self.model.clip is not None
        squares = self.sum_of_squares(request)
        made = []
        for id, array in zip(given, scalars, strict=True):
            feed = {names.SCALARS: id, names.total(names.SQUARES): squares}
            size = {names.updated(names.SCALARS): array.nbytes}
            found = self._run(request, self.model.clip, feed, size, 0)
            made.append(found[names.updated(names.SCALARS)])
        self.drop([squares])
        return made

    def _estimate(
        self, request: StageRequest, key: SumName, graph: StageGraph, gradient: int, scalars: int
    ) -> None:
        """Replace the zeros in a parameter's second moments by an estimate."""
        nbytes = self._resident.parameters[key].weight.nbytes
        moment = self._inner[key][names.moment(1)]
        zeros = self._sent.pop(moment)
        if self._snapshot.get(moment) != zeros:
            self.drop([zeros])
        feed = {names.GRADIENT: gradient, names.SCALARS: scalars}
        found = self._run(request, graph, feed, {names.MOMENT: nbytes}, 0)
        self._sent[moment] = found[names.MOMENT]

    def _difference(self, work: RoundWork) -> StageRequest:
        """Prepare a request for the differences of the current weights from the server's last ones.

        The caller requests the rows.
        """
        self.difference = request = self._request(RequestKind.DIFFERENCE)
        kept = self._snapshot
        for key in work.returned:
            one, exchange = self._resident.parameters[key], self.model.exchange[key]
            feed = {names.START: self._snapshot[one.weight], names.WEIGHT: self._sent[one.weight]}
            made = {each.name: each.kept_bytes for each in exchange.returned}
            if exchange.keeps_error:
                error = self._inner[key][names.ERROR]
                feed[names.ERROR] = self._sent[error]
                made[names.updated(names.ERROR)] = one.weight.nbytes
            found = self._run(request, exchange.difference, feed, made, 0)
            if exchange.keeps_error:
                old, self._sent[error] = self._sent[error], found.pop(names.updated(names.ERROR))
                if kept.get(error) != old:
                    self.drop([old])
            request.kept = [*request.kept, tuple(found.values())]
            for each in exchange.returned:
                name, id = (*key, each.name), found[each.name]
                request.rest += row_pieces(name, id, each.rows, each.columns, each.dtype)
        return request

    @property
    def is_finished(self) -> bool:
        """Return whether all steps are done and the difference has arrived."""
        request = self.difference
        return not (request is None or request.answers or request.rest or self.pending)

    def finish(self) -> None:
        """Drop the difference after it has arrived."""
        assert self.difference is not None
        self.drop([id for kept in self.difference.kept for id in kept])
        self.difference.kept = ()

    def part(self) -> RoundPart:
        """Return what the device did in this round."""
        assert self.difference is not None
        difference: dict[SumName, dict[str, list[Any]]] = {}
        for key, payload in sorted(self.difference.found.items(), key=lambda found: found[0]):
            layer, parameter, name, _ = key
            difference.setdefault((layer, parameter), {}).setdefault(name, []).append(payload)
        losses = {
            (request.batch, key[1]): payload
            for request in self.done
            for key, payload in request.found.items()
        }
        flops = sum(request.flops for request in self.done)
        return RoundPart(
            self.device, self.name, len(self.done), self.tokens, losses, difference,
            self.compute_s, flops, self.updates, self.late, self.identity,
        )  # fmt: skip
