"""Choose how often the holders of resident stages upload a snapshot of their state.

Resident stages keep parameters and optimizer state on devices, called holders. The PS logs the
boundary activations and gradients of every step. After a holder is lost, the next holder downloads
the stage's last snapshot and replays the logged steps since that snapshot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class SnapshotCosts:
    """The costs, in seconds, that determine the snapshot interval of resident stages.

    Snapshots never delay a step. They use the uplink while it is idle: in a part of each step, and
    while training waits for the next holder after a loss.

    Attributes:
        step_s: time of a step without losses.
        upload_s: time to upload one snapshot of the largest stage over an otherwise idle uplink.
        idle_s: time per step during which that stage's uplink is idle.
        replay_s: time in which the next holder replays one logged step of the stage.
        restart_s: time per loss that does not depend on the interval: detection and download.
        between_losses_s: mean time between losses that need a replay from a snapshot. A loss that
            a hot spare covers does not count. Infinite if no loss needs a snapshot.

    Example:
        >>> SnapshotCosts(100, 1000, 20, 30, 200, 6000).best_interval()
        25
    """

    step_s: float
    upload_s: float
    idle_s: float
    replay_s: float
    restart_s: float
    between_losses_s: float

    def best_interval(self, least: float = 1.0) -> int:
        """Return the snapshot interval, in whole steps, that minimizes the average step time.

        If uploads follow each other without a pause, the last complete snapshot is ``k`` to ``2 k``
        steps old. Recovery from a loss then takes ``w(k) = restart + replay 3 k / 2`` on average.
        The shortest possible interval k uses the whole idle uplink:

            upload = k (idle + step / between_losses * w(k))

        Without losses, this is ``upload / idle``. Without idle uplinks and restarts, it is
        ``sqrt(2 / 3 upload between_losses / (replay step))``: Young's square root (1974, "A first
        order approximation to the optimum checkpoint interval") for snapshots whose upload takes a
        whole interval, and replayed steps that take `replay_s` instead of `step_s`.

        Args:
            least: minimum number of steps, such as `least_interval` for a limit on traffic.
        """
        return max(1, math.ceil(max(least, self._upload_steps(0.0, 1.5))))

    def lost_share(self, interval: float) -> float:
        """Return the ratio of recovery time to other training time if no hot spare takes over."""
        return (self.restart_s + 1.5 * interval * self.replay_s) / self.between_losses_s

    def step_with_losses_s(self, interval: float) -> float:
        """Return the average time of a step in seconds, including recovery from losses.

        At a loss, the last complete snapshot is ``k / 2 + d`` steps old on average, where d is the
        number of steps that an upload takes. The time is exact if recoveries do not overlap:

            T(k) = step / (1 - (restart + replay (k / 2 + d)) / between_losses)

        Args:
            interval: number of steps k between snapshots. If an upload takes more steps, k is the
                number of steps of an upload.

        Returns:
            Time in seconds; infinite if a loss costs more time than the mean time between losses.
        """
        interval = max(interval, self._upload_steps(0.0, 1.5))
        age = interval / 2 + self._upload_steps(interval / 2, 1.0)
        lost = (self.restart_s + self.replay_s * age) / self.between_losses_s
        return self.step_s / (1 - lost) if lost < 1 else math.inf

    def _upload_steps(self, age: float, share: float) -> float:
        """Return an upload's number of steps d if a loss replays ``age + share d`` steps.

        This number is the positive root of ``d (idle + step / between (restart + replay (age +
        share d))) = upload``.
        """
        losses = self.step_s / self.between_losses_s
        linear = self.idle_s + losses * (self.restart_s + self.replay_s * age)
        square = losses * self.replay_s * share
        divisor = linear + math.sqrt(linear**2 + 4 * square * self.upload_s)
        return 2 * self.upload_s / divisor if divisor > 0 else math.inf


_HALF: Final = 0.5

# Default limit on the traffic of snapshots and hot spares, relative to all other traffic. With the
# headers of all messages, it is a tenth.
USUAL_SHARE: Final = 0.09


def most_copies(stages: int, snapshots: float, saved: float) -> int:
    """Return the maximum number of stages that hot spares follow.

    Each hot spare downloads a stage's inputs and output gradients, which are half of the stage's
    traffic. Snapshots and hot spares together may add `USUAL_SHARE` to the traffic. Hot spares may
    exceed this limit if they save a larger share of training time than they add to the traffic.

    Args:
        snapshots: traffic of snapshots, relative to the traffic without snapshots.
        saved: share of training time that is lost without hot spares.

    Example:
        >>> most_copies(4, 0.1, 0.0), most_copies(6, 0.0, 0.0), most_copies(4, 0.1, 0.6)
        (0, 1, 4)
    """
    if saved > _HALF:
        return stages
    return math.floor(max(0.0, USUAL_SHARE - snapshots) / _HALF * stages)


def least_interval(
    snapshot_bytes: float, boundary_bytes: float, share: float = USUAL_SHARE
) -> float:
    """Return the interval, in steps, at which snapshots add `share` to a step's traffic.

    Args:
        snapshot_bytes: size of a snapshot of all stages, as sent on the links.
        boundary_bytes: traffic of a step on all links, both directions, without snapshots.
        share: traffic of snapshots, divided by the traffic without snapshots.
    """
    return snapshot_bytes / (share * boundary_bytes)
