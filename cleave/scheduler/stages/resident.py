"""Trained state that stays on devices between steps, and the log from which it can be rebuilt.

The device of a stage holds the weights and optimizer moments of the stage's layers, and updates
them itself. The PS has a *snapshot* of this state, and a log of all later steps. If the device is
lost, another device gets the snapshot and repeats the backward passes and updates in the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cleave.planner.stages.model import PlannedStage
from cleave.scheduler.stages.arrays import StageArray

if TYPE_CHECKING:
    from cleave.scheduler.stages.work import StageGraph, StepWork, SumName


@dataclass(frozen=True, slots=True, eq=False)
class ResidentParameter:
    """A trained parameter and its optimizer state.

    The payloads are the snapshot. On a device, the same `StageArray` objects stand for the current
    values, which only the device has.

    Attributes:
        group: index of the parameter's scalars in those of a step.
    """

    weight: StageArray
    moments: tuple[StageArray, ...]
    group: int

    @property
    def arrays(self) -> tuple[StageArray, ...]:
        """Return the weight, followed by the moments."""
        return self.weight, *self.moments


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A completed step: all that is needed to repeat the updates of a stage.

    Attributes:
        work: the step's layers and their arguments.
        x, dy: for each stage, its inputs and the gradients of its outputs, by micro-batch.
        scalars: coefficients of the optimizer step, by `ResidentParameter.group`.
    """

    work: StepWork
    x: Sequence[Mapping[int, StageArray]]
    dy: Sequence[Mapping[int, StageArray]]
    scalars: Sequence[StageArray]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The trained state of all layers after a step.

    Attributes:
        position: number of all updates until then, as the training thread counts them.
        state: rows of each weight and moment, by array and first row.
    """

    position: int
    state: Mapping[tuple[StageArray, int], Any]


@dataclass(frozen=True, slots=True)
class Resident:
    """The trained state of a step's layers, which stays on devices.

    Attributes:
        parameters: the trained parameters of all layers.
        update: graph that updates a parameter; see `cleave.graphs.optimizer_graphs`.
        squares: graph that adds up squared gradients.
        log: all steps since the snapshot, oldest first.
        fetches: whether the step has no passes, and only fetches the state, as a new snapshot.
        arrays: the weights and moments of all parameters.
    """

    parameters: Mapping[SumName, ResidentParameter]
    update: StageGraph
    squares: StageGraph
    log: Sequence[LoggedStep] = ()
    fetches: bool = False
    arrays: frozenset[StageArray] = field(init=False)

    def __post_init__(self) -> None:
        held = frozenset(a for one in self.parameters.values() for a in one.arrays)
        object.__setattr__(self, "arrays", held)

    def of_stage(self, stage: PlannedStage) -> Iterator[tuple[SumName, ResidentParameter]]:
        """Yield the trained parameters of a stage's layers."""
        for key, one in self.parameters.items():
            if stage.first <= key[0] < stage.stop:
                yield key, one

    def arrays_of(self, stage: PlannedStage) -> Iterator[StageArray]:
        """Yield the weights and moments of a stage's layers."""
        for _, one in self.of_stage(stage):
            yield from one.arrays
