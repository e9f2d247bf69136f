"""Trained state that stays on devices between steps, and the log from which it can be rebuilt.

The device of a stage holds the weights and optimizer moments of the stage's layers, and updates
them itself. The PS has a *snapshot* of this state, and a log of all later steps. If the device is
lost, another device gets the snapshot and repeats the backward passes and updates in the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from cleave.scheduler.stages.arrays import StageArray


@dataclass(frozen=True, slots=True, eq=False)
class ResidentParameter:
    """A trained parameter and its optimizer state.

    The payloads contain the values from the snapshot. In a device's record, the same `StageArray`
    objects stand for the current values, which only the device has.

    Attributes:
        group: index of the parameter's optimizer coefficients in `LoggedStep.scalars`.
    """

    weight: StageArray
    moments: tuple[StageArray, ...]
    group: int

    @property
    def arrays(self) -> tuple[StageArray, ...]:
        """Return the weight, followed by the moments."""
        return self.weight, *self.moments


@dataclass(frozen=True, slots=True, eq=False)
class Lineage:
    """Identifies all state that one device computes from a snapshot that the PS sent to it.

    Attributes:
        position: number of updates before that snapshot; -1 if unknown, because an earlier process
            of the PS sent the snapshot.
    """

    position: int


@dataclass(frozen=True, slots=True)
class KeptState:
    """Describes the trained state on a device after a step, so that a restarted PS can reuse it.

    Attributes:
        arrays: the secret name of the device's arrays, as in `Session.arrays`.
        state: maps (layer number, parameter, index in `ResidentParameter.arrays`) to the wire ID
            and the number of updates of a weight or moment.
        nbytes: size of the state in bytes.
    """

    arrays: str
    state: Mapping[tuple[int, str, int], tuple[int, int]]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Holding:
    """The device that returned a stage's part of a snapshot.

    Attributes:
        lineage: the lineage of the stage's state; None if its parts have different lineages.
    """

    device: int
    lineage: Lineage | None

    def continues(self, position: int, lineages: Set[Lineage]) -> bool:
        """Return whether the device's state provably continues an earlier snapshot.

        This is proven if the PS sent the snapshot to the device, or if the device returned a part
        of the snapshot.

        Args:
            position: number of updates in the earlier snapshot.
            lineages: lineages of all state in the earlier snapshot.
        """
        found = self.lineage
        return found is not None and (found in lineages or found.position == position)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The trained state of all layers after a step.

    Attributes:
        position: total number of updates before the snapshot, as counted by the training thread.
        state: rows of each weight and moment, by array and first row.
        holders: the devices that returned the state, by stage number.
    """

    position: int
    state: Mapping[tuple[StageArray, int], Any]
    holders: Mapping[int, Holding] = field(default_factory=dict)
