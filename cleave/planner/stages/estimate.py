"""A closed-form estimate of the step time by stages, for many arrangements at once.

The estimate covers the forward and backward passes of the first and the last micro-batch. It
ignores layers that the PS computes, and assumes that the PS's network card transfers all weights
first and all gradients last. In arrays, rows are arrangements, and columns are stages or devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cleave.planner.plan import DeviceRates, PsRates
from cleave.planner.stages.model import Keep, LayerCost, PlannedStage, PsCompute, StageModel
from cleave.planner.stages.prediction import (
    RUNTIME_BYTES,
    SPARE,
    input_bytes,
    kept_bytes,
    mask_bytes,
    widened_bytes,
    working_bytes,
)
from cleave.planner.stages.rules import REQUESTS_AT_ONCE
from cleave.planner.tiles.shape import Floats

Integers = npt.NDArray[np.intp]
Truths = npt.NDArray[np.bool_]

TOO_LARGE_S: Final = 1e12  # minimum estimate for an arrangement that does not fit in memory
_LEAST_S: Final = 1e-12
_NO_ROOM_BYTES: Final = 1e18


@dataclass(frozen=True, slots=True)
class Arrangements:
    """Several assignments of a model's layers and a fleet's devices to stages.

    Columns are devices, or groups of devices that are always in the same stage. A stage without
    layers and devices is unused.

    Attributes:
        cuts: index of each stage's first layer, followed by the number of layers; shape
            (arrangements, stages + 1).
        place: the stage of each column, or the number of stages if the column is idle; shape
            (arrangements, columns).
        loss: for each arrangement, whether the last stage computes the loss.
    """

    cuts: Integers
    place: Integers
    loss: Truths

    def __len__(self) -> int:
        return len(self.cuts)

    @property
    def parts(self) -> tuple[Integers, Integers, Truths]:
        return self.cuts, self.place, self.loss

    def take(self, chosen: Integers) -> Arrangements:
        return Arrangements(self.cuts[chosen], self.place[chosen], self.loss[chosen])

    def with_others(self, others: Arrangements) -> Arrangements:
        cuts, place, loss = (
            np.concatenate(both) for both in zip(self.parts, others.parts, strict=True)
        )
        return Arrangements(cuts, place, loss)

    def put(self, chosen: Integers, others: Arrangements) -> None:
        for mine, new in zip(self.parts, others.parts, strict=True):
            mine[chosen] = new


@dataclass(frozen=True, slots=True)
class Columns:
    """Device rates and memory as arrays, with one value per device or per group of devices."""

    downlink: Floats
    uplink: Floats
    flops: Floats
    latency_s: Floats
    memory: Floats
    count: Floats
    codes_downlink: Truths
    codes_uplink: Truths

    @classmethod
    def of(cls, groups: Sequence[Sequence[DeviceRates]]) -> Columns:
        """Return one column for each group of devices.

        A column contains a group's lowest link rates, mean throughput, highest latency and smallest
        memory. In each direction, payloads count as compressed only if all devices compress them.
        """

        def least(name: str) -> Floats:
            return np.array([min(getattr(d, name) for d in group) for group in groups], float)

        return cls(
            least("downlink_bytes_per_s"),
            least("uplink_bytes_per_s"),
            np.array([sum(d.flops_per_s for d in group) / len(group) for group in groups]),
            np.array([max(d.latency_s for d in group) for group in groups], float),
            least("memory_bytes"),
            np.array([len(group) for group in groups], float),
            np.array([all(d.codes_downlink for d in group) for group in groups], bool),
            np.array([all(d.codes_uplink for d in group) for group in groups], bool),
        )

    def take(self, chosen: Integers) -> Columns:
        return Columns(*(getattr(self, each.name)[chosen] for each in fields(self)))

    def down_byte_s(self, coded_ratio: float) -> Floats:
        """Return each downlink's transfer time per byte of uncompressed data, in seconds."""
        return np.where(self.codes_downlink, coded_ratio, 1.0) / self.downlink

    def up_byte_s(self, coded_ratio: float) -> Floats:
        """Return each uplink's transfer time per byte of uncompressed data, in seconds."""
        return np.where(self.codes_uplink, coded_ratio, 1.0) / self.uplink


class StageTables:
    """Costs of each possible stage (run of consecutive layers, with or without the loss).

    Arrays are indexed by *cell*. A cell is an integer that encodes the first layer of a run, its
    stop (last layer plus one), and whether it includes the loss. Sizes are in bytes.

    Attributes:
        weights, gradients: sizes of the weights sent to a device, and of the gradients it returns.
        forward, backward: FLOPs per token of each pass.
        again: FLOPs per token that a backward pass recomputes if nothing was retained.
        forwards: 1 if forward and backward are separate passes; 0 if they are one pass.
        returns: 1 if devices return the input gradient of the stage's first layer, else 0.
        memory: memory that a device needs if it retains nothing between passes.
        kept: memory for one micro-batch's layer inputs; infinite if they are never retained.
        kept_whole: additional memory for activations; infinite if retaining them saves no FLOPs.
        spared: FLOPs per token that retained activations save.
        pieces: number of chunks into which a device cuts a micro-batch.
        memory_of_layers: `memory` without the loss, indexed by first layer and stop.
        memory_of_loss: `memory` of the last layer together with the loss.
        least_layer_bytes: `memory` of the smallest layer.
        by_layer: rows are weight bytes, gradient bytes and FLOPs per token. Columns are the layers,
            followed by the loss.
    """

    def __init__(self, model: StageModel) -> None:
        self.model = model
        self.layers = len(model.layers)
        side = self.layers + 1
        costs = [*model.layers, model.loss]
        ordered = np.arange(side)[:, None] < np.arange(side)
        through = self._sums([cost.forward_flops for cost in costs])
        back = self._sums([cost.flops - cost.forward_flops for cost in costs])
        last = np.array([0.0, *(layer.forward_flops for layer in model.layers)])
        self.weights = self._sums([cost.weight_bytes for cost in costs]).ravel()
        self.gradients = self._sums([cost.gradient_bytes for cost in costs]).ravel()
        # With the loss, the backward pass includes the forward pass.
        alone = np.array([1.0, 0.0])[:, None, None]
        self.forward = (through * alone).ravel()
        self.backward = (back + through * (1 - alone)).ravel()
        self.again = ((through - last * ordered) * alone).ravel()
        self.forwards = (ordered * alone).ravel()
        returns = (np.arange(side) > 0)[:, None] | np.full(side, model.embeds)
        self.returns = (ordered * np.stack([returns, returns])).astype(float).ravel()
        number = np.maximum(0, np.arange(side) - np.arange(side)[:, None])
        masks = mask_bytes(model)
        of_layer = kept_bytes(model, PlannedStage(0, 1, ()), Keep.INPUTS) - masks
        self._inputs = number * of_layer + masks * (number > 0)
        self.kept = np.stack(
            [np.where(number > 0, SPARE * self._inputs, np.inf), np.full((side, side), np.inf)]
        ).ravel()
        whole = max(model.tokens) * self._sums([cost.activation_bytes for cost in costs])
        spared = self._sums([cost.spared_flops for cost in costs])
        self.kept_whole = np.where(spared > 0, SPARE * whole, np.inf).ravel()
        self.spared = spared.ravel()
        pieces = np.ones((2, side, side))
        for number, layer in enumerate(model.layers):
            pieces[0, number, number + 1] = layer.pieces
        self.pieces = pieces.ravel()
        self.memory = self._memory(costs)
        self.memory_of_layers = self.memory.reshape(2, side, side)[0]
        self.least_layer_bytes = float(self.memory_of_layers.diagonal(1).min())
        self.memory_of_loss = float(self.memory.reshape(2, side, side)[1, -2, -1])
        self.by_layer = np.array([(c.weight_bytes, c.gradient_bytes, c.flops) for c in costs]).T

    def most_layers(self, memory: Floats | Integers) -> Integers:
        """Return, for each memory size, the largest number of consecutive layers that can fit."""
        least = [self.memory_of_layers.diagonal(n + 1).min() for n in range(self.layers)]
        found: Integers = np.searchsorted(least, memory, side="right")
        return found

    def cell(self, loss: Truths, first: Integers, stop: Integers) -> Integers:
        """Return the array index (cell) of each stage with layers `first` to `stop` - 1."""
        side = self.layers + 1
        found: Integers = ((loss & (stop == self.layers)) * side + first) * side + stop
        return found

    def _sums(self, values: Sequence[float]) -> Floats:
        """Return the sum of `values` over each run of layers, shape (2, layers + 1, layers + 1)."""
        until = np.concatenate([[0.0], np.cumsum(np.array(values[:-1], float))])
        plain = np.triu(until - until[:, None])
        with_loss = plain.copy()
        with_loss[:-1, -1] += values[-1]
        return np.stack([plain, with_loss])

    def _largest(self, values: Sequence[float]) -> Floats:
        """Return the maximum of `values` over each run, shape (2, layers + 1, layers + 1)."""
        plain = np.zeros((self.layers + 1, self.layers + 1))
        for first in range(self.layers):
            plain[first, first + 1 :] = np.maximum.accumulate(np.array(values[first:-1], float))
        with_loss = plain.copy()
        with_loss[:-1, -1] = np.maximum(with_loss[:-1, -1], values[-1])
        return np.stack([plain, with_loss])

    def _memory(self, costs: Sequence[LayerCost]) -> Floats:
        held = self._sums([c.frozen_bytes + c.weight_bytes + c.sum_bytes for c in costs])
        held += self._largest([widened_bytes(self.model, c) for c in costs])
        working = self._largest([working_bytes(self.model, c.working_bytes) for c in costs])
        for number, cost in enumerate(costs[:-1]):
            of_piece = working_bytes(self.model, cost.working_bytes / cost.pieces)
            working[0, number, number + 1] = of_piece
        held += working
        held += input_bytes(self.model) + RUNTIME_BYTES + self._inputs
        for cut in self.model.cuts:  # no stage may have layers on both sides of a PS layer
            held[:, :cut, cut + 1 :] += _NO_ROOM_BYTES
        if self.model.ends_at_ps:
            held[1] += _NO_ROOM_BYTES
        spare: Floats = SPARE * held.ravel()
        return spare


class Estimator:
    """Computes a closed-form estimate of each arrangement's step time.

    Args:
        tables: costs of each run of consecutive layers.
        columns: rates of the devices, or of the groups of devices.
        fixed: whether every stage in every arrangement has exactly one column. If so, the times of
            each possible stage are computed only once.
    """

    def __init__(
        self, tables: StageTables, columns: Columns, ps: PsCompute, *, fixed: bool = False
    ) -> None:
        self.tables = tables
        self.columns = columns
        self._fixed = fixed
        self._ps = ps
        model, card = tables.model, ps.rates or PsRates()
        self._batches = len(model.tokens)
        self._tokens = sum(model.tokens) / self._batches
        self._activation_bytes = self._tokens * model.width * model.element_bytes
        self._input_bytes = self._activation_bytes + self._tokens * model.beside_bytes
        self._loss_s = self._tokens * ps.loss_s(model.loss)
        self._optimizer_s = ps.optimizer_s
        self._out_s = max(1 / card.egress_bytes_per_s, card.byte_s)
        self._in_s = max(1 / card.ingress_bytes_per_s, card.byte_s)
        # For each column, bytes sent per uncompressed byte.
        self._down_share = np.where(columns.codes_downlink, model.coded_ratio, 1.0)
        self._up_share = np.where(columns.codes_uplink, model.coded_ratio, 1.0)
        self._gradient_share = np.where(columns.codes_uplink, model.gradient_coded_ratio, 1.0)

    def seconds(self, arrangements: Arrangements) -> Floats:
        """Return the estimated step time in seconds of each arrangement.

        If a device has too little memory, the estimate is at least `TOO_LARGE_S`, and increases
        with the missing memory. If a stage has layers but no devices, or devices but no layers, the
        estimate is infinite.
        """
        tables, place = self.tables, arrangements.place
        first, stop = arrangements.cuts[:, :-1], arrangements.cuts[:, 1:]
        count = Spread(place, first.shape[1]).total_of(self.columns.count)
        cells = tables.cell(arrangements.loss[:, None], first, np.maximum(first, stop))
        row = np.arange(len(place))[:, None]
        cell = np.concatenate([cells, np.zeros_like(row)], axis=1)[row, place]
        possible = (stop >= first).all(axis=1) & ((count > 0) == (stop > first)).all(axis=1)
        spare = self.columns.memory - tables.memory[cell]
        missing = np.maximum(0.0, -spare / self.columns.memory).sum(axis=1)
        found = np.where(possible, TOO_LARGE_S * (1 + missing), np.inf)
        chosen = np.flatnonzero(possible & (missing == 0))
        if len(chosen):
            if self._fixed:
                times = self._looked_up(cells[chosen], place[chosen])
            else:
                spread = Spread(place[chosen], first.shape[1])
                stages = (count[chosen] > 0).sum(axis=1, keepdims=True)
                times = self._times(cells[chosen], cell[chosen], count[chosen], spread, stages)
            found[chosen] = self._step_s(times, cells[chosen])
        return found

    def _looked_up(self, cells: Integers, place: Integers) -> StageTimes:
        """Return the times of stages with one device or group each, from the precomputed table."""
        column = np.empty_like(place)
        column[np.arange(len(place))[:, None], place] = np.arange(place.shape[1])
        number, times = self._table
        chosen = number[column, cells]
        return StageTimes(*(each.take(chosen) for each in times))

    @cached_property
    def _table(self) -> tuple[Integers, StageTimes]:
        """Return the times of each column (device or group) for each stage it has memory for.

        The first array maps a column and a cell to an index in the arrays of times.
        """
        stages = len(self.columns.memory)
        layers = np.arange(self.tables.layers + 1)
        run = layers - layers[:, None]
        possible = np.tile((run > 0) & (run <= self.tables.layers + 1 - stages), (2, 1)).ravel()
        fits = possible & (self.tables.memory <= self.columns.memory[:, None])
        column, cell = np.nonzero(fits)
        alone = Estimator(self.tables, self.columns.take(column[:, None]), self._ps)
        cell, place = cell[:, None], np.zeros_like(cell)[:, None]
        times = alone._times(cell, cell, alone.columns.count, Spread(place, 1), np.array(stages))
        number = np.zeros(fits.shape, np.intp)
        number[fits] = np.arange(len(cell))
        return number, StageTimes(*(each.ravel() for each in times))

    def _spared(self, cell: Integers, spare: Floats, under_way: Floats) -> Floats:
        """Return the FLOPs per token that each device saves by retaining activations.

        `spare` is each device's free memory in bytes. `under_way` is the number of micro-batches
        whose layer inputs each device retains at once.
        """
        tables = self.tables
        in_request = tables.forwards[cell] == 0  # forward and backward are one run
        batches = np.where(in_request, 1.0, under_way)
        inputs = np.where(in_request, 0.0, batches * np.where(in_request, 0.0, tables.kept[cell]))
        room = np.maximum(0.0, spare - inputs) // np.maximum(1.0, tables.kept_whole[cell])
        share = np.minimum(1.0, room / np.maximum(1.0, batches)) * (batches > 0)
        found: Floats = tables.spared[cell] * np.where(in_request, np.floor(share), share)
        return found

    def _times(
        self, cells: Integers, cell: Integers, count: Floats, spread: Spread, stages: Integers
    ) -> StageTimes:
        """Return the stage times of arrangements that fit in memory, one row per arrangement.

        `cells` and `count` are the cell and the number of devices of each stage. `cell` is the cell
        of each column's stage. `stages` is the number of stages in each arrangement.
        """
        tables, columns, batches = self.tables, self.columns, self._batches
        spare = columns.memory - tables.memory[cell]
        kept = np.minimum(batches, spare // tables.kept[cell])
        under_way = np.minimum(kept, REQUESTS_AT_ONCE * (1 + stages))
        spared = self._spared(cell, spare, under_way)
        again = np.maximum(0.0, 1 - spread.total(kept * columns.count) / batches)
        repeats = spread.gather(again)  # share of micro-batches that are not retained

        # For each device, seconds of downlink, processor and uplink for one micro-batch.
        forwards = tables.forwards[cell]
        model = tables.model
        down_byte_s = columns.down_byte_s(model.coded_ratio)
        gradient_byte_s = columns.up_byte_s(model.gradient_coded_ratio)
        dy_s = self._activation_bytes * down_byte_s
        x_s = self._input_bytes * down_byte_s
        y_s = self._activation_bytes * columns.up_byte_s(model.coded_ratio)
        token_s = self._tokens / columns.flops
        back = tables.backward[cell] + tables.again[cell] * repeats - spared
        ahead_s = x_s * forwards, tables.forward[cell] * token_s, y_s * forwards
        # A stage with the loss receives x once. Other stages receive x again for the backward pass
        # of micro-batches that were not retained.
        x_back_s = np.where(forwards > 0, dy_s + x_s * repeats, x_s)
        back_s = x_back_s, back * token_s, y_s * tables.returns[cell]
        pieces = tables.pieces[cell]
        one_ahead_s = _in_pieces(ahead_s, pieces) + 2 * columns.latency_s * forwards
        one_back_s = _in_pieces(back_s, pieces) + 2 * columns.latency_s
        both_s = [a + b for a, b in zip(ahead_s, back_s, strict=True)]
        each_ahead_s = _most(*ahead_s, one_ahead_s / REQUESTS_AT_ONCE)
        each_back_s = _most(*back_s, one_back_s / REQUESTS_AT_ONCE)
        each_s = _most(*both_s, (one_ahead_s + one_back_s) / REQUESTS_AT_ONCE)

        # Each device gets the next micro-batch as soon as the device is free.
        speed = 1 / np.maximum(each_s, _LEAST_S)
        share = speed / spread.gather(spread.total(speed * columns.count))
        takes = np.maximum(batches * share, 1.0)
        # Micro-batches are not divided: with 16 on 15 devices, one device takes 2.
        some = np.maximum(1.0, count)
        rounds = np.ceil(batches / some)

        def others(each_s: Floats) -> Floats:
            most = spread.most(1 / np.maximum(each_s, _LEAST_S))
            fastest_s = np.where(count > 0, 1 / np.maximum(most, _LEAST_S), 0.0)
            return _most(spread.most((takes - 1) * each_s), (rounds - 1) * fastest_s)

        weights = tables.weights[cells] * spread.total_of(columns.count * self._down_share)
        gradients = tables.gradients[cells] * spread.total_of(columns.count * self._gradient_share)
        down_share = spread.total_of(columns.count * self._down_share) / some
        up_share = spread.total_of(columns.count * self._up_share) / some
        forwards_of = tables.forwards[cells]
        inputs = np.where(forwards_of > 0, 1 + again, 1.0) * (count > 0)
        moved = batches * self._activation_bytes
        came = batches * self._input_bytes * inputs + moved * forwards_of
        went = moved * (forwards_of + tables.returns[cells]) * up_share
        return StageTimes(
            loaded_s=spread.most(tables.weights[cell] * down_byte_s),
            ahead_s=spread.most(one_ahead_s),
            others_ahead_s=others(each_ahead_s),
            back_s=spread.most(one_back_s),
            others_back_s=others(each_back_s),
            others_s=others(each_s),
            gradients_s=spread.most(tables.gradients[cell] * gradient_byte_s),
            weight_bytes=weights,
            input_bytes=came * down_share,
            output_bytes=went,
            gradient_bytes=gradients,
        )

    def _step_s(self, times: StageTimes, cells: Integers) -> Floats:
        """Return the step time in seconds of each arrangement, computed from the stage times."""
        weights_s = times.weight_bytes.sum(axis=1) * self._out_s
        down_s = weights_s + times.input_bytes.sum(axis=1) * self._out_s
        up = times.gradient_bytes.sum(axis=1) + times.output_bytes.sum(axis=1)
        loss_there = (cells >= (self.tables.layers + 1) ** 2).any(axis=1)
        by_stage = StageTimes(*(np.ascontiguousarray(each.T) for each in times))
        end_s = _end_s(
            by_stage,
            np.maximum(by_stage.loaded_s, weights_s),
            by_stage.gradient_bytes * self._in_s,
            np.where(loss_there, 0.0, self._loss_s),
            self._batches,
        )
        return _most(end_s, down_s, up * self._in_s) + self._optimizer_s


class StageTimes(NamedTuple):
    """Times and traffic of each stage. Times exclude waiting for other stages.

    Arrays have one column per stage.

    Attributes:
        loaded_s: time until the stage's weights have arrived.
        ahead_s, back_s: time of one forward pass, and of one backward pass.
        others_ahead_s, others_back_s: time of all but one of the forward passes, and of all but one
            of the backward passes, on the slowest device.
        others_s: time of all passes but one forward and one backward pass, on the slowest device.
        gradients_s: transfer time of the weight gradients on the slowest uplink.
        weight_bytes, input_bytes, output_bytes, gradient_bytes: traffic on the PS's network card.
    """

    loaded_s: Floats
    ahead_s: Floats
    others_ahead_s: Floats
    back_s: Floats
    others_back_s: Floats
    others_s: Floats
    gradients_s: Floats
    weight_bytes: Floats
    input_bytes: Floats
    output_bytes: Floats
    gradient_bytes: Floats


def _end_s(
    times: StageTimes, loaded_s: Floats, card_s: Floats, loss_s: Floats, batches: int
) -> Floats:
    """Return the time in seconds until all weight gradients have arrived, for each arrangement.

    Arrays have one row per stage. `loaded_s` is the time until a stage's weights have passed the
    PS's network card and the links. `card_s` is the time that a stage's gradients take on the
    network card. `loss_s` is the time of one micro-batch's loss on the PS.
    """
    ahead = np.empty_like(loaded_s)
    first = np.zeros_like(loss_s)
    for row, loaded, ahead_s in zip(ahead, loaded_s, times.ahead_s, strict=True):
        first = np.maximum(first, loaded, out=row)
        first += ahead_s
    # From the last stage to the first: each stage waits for the next one.
    back = np.add.accumulate([first + loss_s, *times.back_s[:0:-1]])[::-1]

    # As soon as gradients arrive, backward passes take precedence over forward passes.
    alone_s = times.others_ahead_s
    share = np.minimum(1.0, (back - ahead) / np.maximum(alone_s, _LEAST_S))
    others_ahead = ahead + (share * alone_s + (1 - share) * times.others_s)
    ends = np.maximum(back + times.others_back_s, ahead + times.others_s)

    last = np.zeros_like(loss_s)
    for ahead_s, others_s in zip(times.ahead_s, others_ahead, strict=True):
        last += ahead_s
        np.maximum(last, others_s, out=last)
    last = np.maximum(last + loss_s, ahead[-1] + batches * loss_s)
    received = np.zeros_like(loss_s)
    for row, back_s, through_s in zip(ends[::-1], times.back_s[::-1], card_s[::-1], strict=True):
        last = np.maximum(last, row, out=row)
        last += back_s
        received = np.maximum(received, row) + through_s
    return _most(received, (ends + times.gradients_s).max(axis=0))


class Spread:
    """Aggregates the values of devices, or of groups of devices (columns), by stage."""

    def __init__(self, place: Integers, stages: int) -> None:
        self._shape = len(place), stages + 1
        self._at = (np.arange(len(place))[:, None] * (stages + 1) + place).ravel()
        self._place_shape = place.shape

    def total(self, values: Floats) -> Floats:
        """Return the sum of `values` over the devices or groups (columns) of each stage."""
        size = self._shape[0] * self._shape[1]
        found: Floats = np.bincount(self._at, values.ravel(), size).astype(np.float64)
        return found.reshape(self._shape)[:, :-1]

    def total_of(self, columns: Floats) -> Floats:
        """Return `total` for one value per column that is the same in all arrangements."""
        return self.total(np.broadcast_to(columns, self._place_shape))

    def most(self, values: Floats) -> Floats:
        """Return the maximum of `values` over the devices or groups (columns) of each stage."""
        found = np.zeros(self._shape[0] * self._shape[1])
        np.maximum.at(found, self._at, values.ravel())
        return found.reshape(self._shape)[:, :-1]

    def gather(self, values: Floats) -> Floats:
        """Return the stage's value for each device or group (column); 1 if the column is idle."""
        padded = np.ones(self._shape)
        padded[:, :-1] = values
        found: Floats = padded.ravel()[self._at].reshape(self._place_shape)
        return found


def _in_pieces(parts_s: Sequence[Floats], pieces: Floats) -> Floats:
    """Return the time in seconds of a pass in chunks if transfers and computation overlap."""
    total: Floats = sum(parts_s) / pieces + (1 - 1 / pieces) * _most(*parts_s)
    return total


def _most(first: Floats, *others: Floats) -> Floats:
    for other in others:
        first = np.maximum(first, other)
    return first
