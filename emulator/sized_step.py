"""Emulates training steps by tiles from array sizes only, for models of any size.

GEMMs are submitted in the order of training. The forward pass runs one Linear after another. The
backward pass runs both GEMMs of a Linear (input and weight gradient) together. All matrices are
views of a single zero, so a model of any size needs no memory. Results are not computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cleave.arrays import Buffer, DType
from cleave.fleet.counters import FleetCounters
from cleave.fleet.fleet import Fleet
from cleave.fleet.product import GemmFuture, Operand, Side
from cleave.planner.stages.model import PsCompute
from cleave.planner.stages.prediction import local_step_s
from cleave.planner.tiles.boxes import collector_paused
from cleave.scheduler.tiles.gemm_job import RESIDENCY_DEVICES
from cleave.workload.registry import ModelSpec
from cleave.workload.stages import StageSizes, cut_batch
from cleave.workload.step import ONCE, LinearShape, siblings_in_order, step_flops
from emulator.timeline import Timelines
from emulator.virtual import VirtualRuntime


@dataclass(frozen=True, slots=True)
class SizedStep:
    """Result of an emulated step.

    Attributes:
        fleet_s: duration of the step in virtual seconds.
        wall_s: real seconds that the emulation took.
        events: number of events that were emulated one by one.
        reused_events: number of events that were replayed from timelines (`emulator.timeline`).
        counters: bytes, GEMMs, tiles and blocks of the step.
    """

    fleet_s: float
    wall_s: float
    events: int
    reused_events: int
    counters: FleetCounters


def server_s(spec: ModelSpec, rows: int, sequence: int, flops_per_s: float) -> float:
    """Return the time in seconds of attention in a step by tiles, which the server computes.

    As in `cleave plan`, this is the time of a step without devices, minus the time of the GEMMs
    that run on devices.

    Args:
        spec: the model.
        rows: number of sequences in the batch.
        sequence: number of tokens in a sequence.
        flops_per_s: throughput of the server.
    """
    model = StageSizes(spec, sequence, 2, 2).costs(cut_batch(rows, sequence, 1))
    alone_s = local_step_s(model, PsCompute(flops_per_s, 0.0))
    return max(0.0, alone_s - step_flops(spec, rows, sequence) / flops_per_s)


class SizedStepper:
    """Emulates whole steps or single layers on a virtual fleet that computes no results.

    Args:
        fleet: a fleet from `emulated(..., compute=False)`.
        spec: the model.
        tokens: number of tokens in the batch (sequences times sequence length).
        dtype: dtype of weights and activations.
        reuse: replay recorded timelines for groups of Linears with equal shapes. Ignored on fleets
            of up to `RESIDENCY_DEVICES` devices. There, operands live as long as in training, and
            devices reuse the arrays that they hold.
    """

    def __init__(
        self, fleet: Fleet, spec: ModelSpec, tokens: int, dtype: DType, *, reuse: bool = True
    ) -> None:
        runtime = fleet.runtime
        if not isinstance(runtime, VirtualRuntime):
            raise TypeError("steps by sizes alone run on emulated fleets")
        self._fleet = fleet
        self._runtime = runtime
        self._tokens = tokens
        self._dtype = dtype
        self._resident = fleet.device_count <= RESIDENCY_DEVICES
        self._spec = spec
        self._groups = siblings_in_order(spec)
        self._timelines = None if self._resident else Timelines(runtime, reuse=reuse)
        self._kept: dict[tuple[int, str], Operand] = {}

    @property
    def groups(self) -> int:
        """Return the number of groups in one pass. The Linears of a group share their input."""
        return len(self._groups)

    def step(self, progress: Callable[[int, int], None] | None = None) -> SizedStep:
        """Emulate the forward and backward pass of all layers.

        Args:
            progress: called with the number of finished groups and the total number of groups in
                both passes.
        """
        count = self.groups
        order = [(i, True) for i in range(count)] + [(i, False) for i in reversed(range(count))]
        return self._measured(order, progress)

    def layer(self, index: int) -> SizedStep:
        """Emulate the forward and backward pass of decoder layer `index`."""
        in_layers = [i for i, group in enumerate(self._groups) if group[0].name not in ONCE]
        per_layer = len(in_layers) // self._spec.layers
        begin = in_layers[0] + index * per_layer
        end = begin + per_layer
        order = [(i, True) for i in range(begin, end)]
        return self._measured([*order, *((i, False) for i, _ in reversed(order))], None)

    def _measured(
        self, order: list[tuple[int, bool]], progress: Callable[[int, int], None] | None
    ) -> SizedStep:
        runtime, timelines = self._runtime, self._timelines
        begin_s, wall_s = runtime.now_s, time.perf_counter()
        events, counters = runtime.events, runtime.counters()
        reused = timelines.reused_events if timelines else 0
        with collector_paused():  # events create many long-lived objects but no reference cycles
            for done, (index, forward) in enumerate(order):
                self._group(index, forward=forward)
                if progress is not None:
                    progress(done + 1, len(order))
            self._kept.clear()
            runtime.settle()
        return SizedStep(
            runtime.now_s - begin_s,
            time.perf_counter() - wall_s,
            runtime.events - events,
            (timelines.reused_events if timelines else 0) - reused,
            runtime.counters() - counters,
        )

    def _group(self, index: int, *, forward: bool) -> None:
        linears = self._groups[index]

        def run() -> None:
            (self._forward if forward else self._backward)(index, linears)
            if not self._resident:
                self._kept.clear()

        if self._timelines is None:
            run()
        else:
            key = (forward, tuple((s.inputs, s.outputs) for s in linears))
            self._timelines.run(key, run)

    def _forward(self, index: int, linears: tuple[LinearShape, ...]) -> None:
        for linear in linears:
            x = self._operand(index, "x", self._tokens, linear.inputs)
            w = self._operand(index, linear.name, linear.outputs, linear.inputs)
            self._submit(Side(x), Side(w, True)).result()

    def _backward(self, index: int, linears: tuple[LinearShape, ...]) -> None:
        for linear in reversed(linears):
            x = self._operand(index, "x", self._tokens, linear.inputs)
            w = self._operand(index, linear.name, linear.outputs, linear.inputs)
            dy = self._fleet.operand(self._matrix(self._tokens, linear.outputs))
            futures = [self._submit(Side(dy), Side(w)), self._submit(Side(dy, True), Side(x))]
            for future in futures:
                future.result()
            self._kept.pop((index, linear.name), None)
        self._kept.pop((index, "x"), None)

    def _operand(self, index: int, name: str, rows: int, columns: int) -> Operand:
        """Return an operand, which lives until the end of its group or of its backward pass."""
        operand = self._kept.get((index, name))
        if operand is None:
            operand = self._fleet.operand(self._matrix(rows, columns))
            self._kept[index, name] = operand
        return operand

    def _submit(self, a: Side, b: Side) -> GemmFuture:
        return self._fleet.submit(a, b, self._matrix(a.shape[0], b.shape[1]))

    def _matrix(self, rows: int, columns: int) -> Buffer:
        zero = np.zeros((), self._dtype.storage)
        return Buffer(np.broadcast_to(zero, (rows, columns)), self._dtype)
