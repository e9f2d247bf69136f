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


@dataclass(frozen=True, slots=True, eq=False)
class Lineage:
    """Identifies all state that one device computes from a snapshot that the PS sent to it.

    Attributes:
        position: number of updates in that snapshot; -1 if it is not known, because an earlier
            process of the PS sent it.
    """

    position: int


@dataclass(frozen=True, slots=True)
class KeptState:
    """The trained state that a device has after a step, by which a restarted PS finds it again.

    Attributes:
        arrays: the secret name of the device's arrays; see `Session.arrays`.
        state: wire ID and number of updates of each weight and moment, by layer number, parameter
            and position in `ResidentParameter.arrays`.
        nbytes: size of the state.
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
        """Return whether the device certainly began with its stage's part of an earlier snapshot.

        That is certain if the PS sent the snapshot to the device, or if the snapshot has state that
        the device returned.

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
        position: number of all updates until then, as the training thread counts them.
        state: rows of each weight and moment, by array and first row.
        holders: the devices that returned the state, by stage number.
    """

    position: int
    state: Mapping[tuple[StageArray, int], Any]
    holders: Mapping[int, Holding] = field(default_factory=dict)
