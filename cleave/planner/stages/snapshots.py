"""Choose how often the holders of resident stages upload a snapshot of their state.

Resident stages keep parameters and optimizer state on devices, called holders. The PS logs the
boundary activations and gradients of every step. After a holder is lost, the next holder downloads
the stage's last snapshot and replays the logged steps since that snapshot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SnapshotCosts:
    """The costs, in seconds, that determine the snapshot interval of resident stages.

    Snapshots use the uplink while it is idle. If the idle time of an interval is too short, the
    snapshot takes the rest from the step, which becomes longer.

    Attributes:
        step_s: time of a step without losses and snapshots.
        upload_s: time to upload one snapshot of the largest stage over an otherwise idle uplink.
        idle_s: time per step during which that stage's uplink is idle.
        replay_s: time in which the next holder replays one logged step of the stage.
        restart_s: time per loss that does not depend on the interval: detection and download.
        between_losses_s: mean time between losses that need a replay from a snapshot. A loss that
            a hot spare covers does not count. Infinite if no loss needs a snapshot.
    """

    step_s: float
    upload_s: float
    idle_s: float
    replay_s: float
    restart_s: float
    between_losses_s: float

    def step_with_losses_s(self, interval: float) -> float:
        """Return the average time of a step, including snapshots and recovery from losses.

        The upload of a snapshot takes ``d = min(k, upload / idle)`` of the ``k`` steps of an
        interval. So at a loss, the last complete snapshot is on average ``k / 2 + d`` steps old:

            T(k) = step + max(0, upload / k - idle)
                   + step / between_losses * (restart + replay (k / 2 + d))

        Args:
            interval: number of steps k between snapshots, above zero.

        Returns:
            Time in seconds. As in Young's model, losses during a recovery are not counted.
        """
        uploading = min(interval, self._idle_interval)
        exposed_s = max(0.0, self.upload_s / interval - self.idle_s)
        lost_s = self.restart_s + self.replay_s * (interval / 2 + uploading)
        return self.step_s + exposed_s + self.step_s / self.between_losses_s * lost_s

    def best_interval(self, least: float = 1.0) -> int:
        """Return the interval with the shortest average step, in whole steps.

        The optimum of `step_with_losses_s` is the shorter of two intervals:

            upload / idle                                         the idle uplink is just enough
            sqrt(2 upload between_losses / (3 replay step))       Young's square root

        The second one minimizes ``upload / k + step / between_losses * replay * 3 k / 2``. It
        follows Young (1974), "A first order approximation to the optimum checkpoint interval",
        with two differences: a snapshot stays open for a whole interval (3/2 instead of 1/2), and
        a replayed step takes `replay_s` instead of `step_s`.

        Args:
            least: minimum number of steps, such as the limit of `least_interval`.
        """
        root = self.upload_s * self.between_losses_s / (self.replay_s * self.step_s)
        return max(1, math.ceil(max(least, min(self._idle_interval, math.sqrt(2 / 3 * root)))))

    @property
    def _idle_interval(self) -> float:
        return self.upload_s / self.idle_s if self.idle_s > 0 else math.inf


def least_interval(snapshot_bytes: float, boundary_bytes: float, share: float = 0.1) -> float:
    """Return the interval, in steps, at which snapshots add `share` to a step's traffic.

    Args:
        snapshot_bytes: size of a snapshot of all stages on the links.
        boundary_bytes: traffic of a step on all links, both directions, without snapshots.
        share: traffic of snapshots, divided by the traffic without snapshots.
    """
    return snapshot_bytes / (share * boundary_bytes)
