"""Divide each step's sequences among several servers and exchange the results.

A server's speed is predicted for its first step, and measured from then on, including the fixed
cost of a step. Over several steps, the division converges to equal times on all servers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Final, TypeVar

import msgspec

from cleave.errors import CleaveError, FleetError
from cleave.fleet.local_fallback import AbandonedError
from cleave.scheduler.counters import FleetCounters
from cleave.training.data.batches import Batch
from cleave.training.loop.job_fleet import JobFleet
from cleave.training.loop.optimizer import Optimizer
from cleave.training.servers.ranks import LostServerError, Ranks

# Minimum fraction of the step time that a new division must save, because servers must replan.
_WORTH: Final = 0.1

_NEWEST: Final = 0.5  # weight of the newest step in the moving average of a server's speed


def deal(rows: int, speeds: Sequence[float]) -> list[int]:
    """Return the number of batch rows that each server computes.

    Args:
        speeds: relative speed of each server. If all speeds are 0, rows are divided equally.
    """
    total = sum(speeds)
    if not total:
        return deal(rows, [1.0] * len(speeds))
    shares = [rows * speed / total for speed in speeds]
    dealt = [int(share) for share in shares]
    # Each remaining row goes to the server that would finish its rows first.
    able = [rank for rank, speed in enumerate(speeds) if speed]
    for _ in range(rows - sum(dealt)):
        dealt[min(able, key=lambda rank: (dealt[rank] + 1) / speeds[rank])] += 1
    return dealt


_TRUST: Final = 1.05  # factor applied to a server's speed after each step without rows


def speed_after(rows_per_s: float, rows: int, seconds: float, capacity: float) -> float:
    """Return a server's speed, relative to the capacity of its fleet, after a step.

    After a step without rows, the speed is raised slightly, so that the server gets rows again.

    Args:
        rows_per_s: previous speed in rows per second, divided by the fleet's capacity in FLOP/s. It
            is 0 before the first prediction or step.
        capacity: the fleet's capacity in FLOP/s.
    """
    if capacity <= 0:
        return rows_per_s
    if not rows:
        return rows_per_s * _TRUST
    if seconds > 0:
        shown = rows / seconds / capacity
        return (1 - _NEWEST) * (rows_per_s or shown) + _NEWEST * shown
    return rows_per_s


def deal_again(rows: int, speeds: Sequence[float], kept: list[int]) -> list[int]:
    """Return the number of rows that each server computes in the next step.

    Args:
        kept: row counts of the previous step. They are returned unchanged if they add up to `rows`
            and new counts would not save enough time.
    """
    new = deal(rows, speeds)
    if sum(kept) != rows or _step_s(new, speeds) < (1 - _WORTH) * _step_s(kept, speeds):
        return new
    return kept


def _step_s(dealt: Sequence[int], speeds: Sequence[float]) -> float:
    """Return the predicted step time of a division, which is the time of the slowest server."""
    pairs = [(rows, speed) for rows, speed in zip(dealt, speeds, strict=True) if rows]
    return max((rows / speed if speed else float("inf") for rows, speed in pairs), default=0.0)


def part_of(batches: Sequence[Batch], dealt: Sequence[int], rank: int) -> list[Batch]:
    """Return the micro-batches, or parts of micro-batches, that one server computes.

    Args:
        batches: all micro-batches of the step, each with the same number of rows.
        dealt: number of rows that each server computes.
    """
    first = sum(dealt[:rank])
    past = first + dealt[rank]
    size = len(batches[0].ids)
    found = []
    for number, batch in enumerate(batches):
        rows = slice(max(first - number * size, 0), max(past - number * size, 0))
        if len(batch.ids[rows]):
            positions = None if batch.positions is None else batch.positions[rows]
            found.append(Batch(batch.ids[rows], batch.labels[rows], positions))
    return found


# Seconds without a device after which a server abandons its part. All servers repeat the step.
GIVES_BACK_S: Final = 10.0

_Value = TypeVar("_Value")


class SharedSteps:
    """Divides each step's sequences among servers, in proportion to the servers' speeds.

    Args:
        fleet: this server's fleet; None if the server computes without devices.
        clock: returns the current time in seconds.
        say: called with a message on rank 0 whenever the division changes.

    Attributes:
        first_row: index of this server's first sequence among all sequences of the step.
    """

    def __init__(
        self,
        ranks: Ranks,
        fleet: JobFleet | None,
        clock: Callable[[], float] = time.perf_counter,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._ranks = ranks
        self._fleet = fleet
        self._clock = clock
        self._rows_per_s = 0.0  # speed of this server; see `speed_after`
        self._dealt: list[int] = []  # number of rows of each server in the last step
        self._say = say
        self._deserted_since_s: float | None = None
        self.first_row = 0

    @property
    def several(self) -> bool:
        """Return True if more than one server trains the model."""
        return self._ranks.count > 1

    def part(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return this server's part of a step's micro-batches, which are the same on all servers.

        A server without devices gets no rows. If no server has devices, the last division is kept.
        """
        rows = sum(len(batch.ids) for batch in batches)
        self._deserted_since_s = None  # restart the wait of GIVES_BACK_S seconds in each step
        capacity = self._capacity()
        if capacity and not self._rows_per_s:
            predicted_s = self._fleet.predicted_s(batches) if self._fleet is not None else rows
            self._rows_per_s = speed_after(0.0, rows, predicted_s, capacity)
        speeds = self._ranks.agree(capacity * self._rows_per_s)
        dealt = deal_again(rows, speeds, self._dealt)
        if dealt != self._dealt and not self._ranks.rank:
            self._say(f"the servers compute {' + '.join(map(str, dealt))} sequences of each step")
        self._dealt = dealt
        self.first_row = sum(dealt[: self._ranks.rank])
        return part_of(batches, dealt, self._ranks.rank)

    def turns(self) -> tuple[int, int | None, int]:
        """Return this server's share of a list of items, as the (start, stop, step) of a slice.

        Items are assigned round-robin to the servers with devices. If no server has devices, items
        are assigned to all servers.
        """
        self._deserted_since_s = None
        able = self._ranks.agree(self._capacity() > 0)
        servers = [rank for rank, can in enumerate(able) if can] or list(range(len(able)))
        if self._ranks.rank not in servers:
            return 0, 0, 1
        return servers.index(self._ranks.rank), None, len(servers)

    def do(self, part: Sequence[Batch], work: Callable[[], float], sums: Optimizer) -> float:
        """Compute this server's part of a step, sum gradients, and update this server's speed.

        Args:
            work: computes the gradients of `part`; returns the part's contribution to the loss.
            sums: sums the gradients over all servers.

        Returns:
            The loss of the whole step.

        Raises:
            AbandonedError: if a server abandons its part of the step. No weight is updated.
            CleaveError: if a server fails.
        """
        began_s, capacity = self._now(), self._capacity()
        took_s = 0.0

        def timed() -> float:
            nonlocal took_s
            try:
                loss = work() if part else 0.0
            except LostServerError:
                raise
            except CleaveError:
                sums.add_up()  # other servers wait for this server's gradients
                raise
            took_s = self._now() - began_s
            if self._on_wall_clock:
                took_s -= sums.waited_s
            sums.add_up()
            return loss

        losses = self.together(timed)
        rows = sum(len(batch.ids) for batch in part)
        self._rows_per_s = speed_after(self._rows_per_s, rows, took_s, capacity)
        return sum(losses)

    def together(self, work: Callable[[], _Value]) -> list[_Value]:
        """Run `work` on this server and return the results of all servers in rank order.

        Args:
            work: returns a JSON-serializable result.

        Raises:
            AbandonedError: on all servers, if a server abandons its work, or if some servers, but
                not all, lose all their devices.
            CleaveError: on all servers, if a server fails for another reason, or if every
                server loses all its devices.
        """
        if not self.several:
            return [work()]
        said: dict[str, Any] = {}
        failure: CleaveError | None = None
        try:
            said["done"] = work()
        except AbandonedError as error:
            said["abandoned"] = str(error)
        except CleaveError as error:
            failure = error
            said["failed"] = str(error)
            said["deserted"] = isinstance(error, FleetError) and not self._capacity()
        everyone = self._ranks.agree(said)
        failed = [(rank, each) for rank, each in enumerate(everyone) if "failed" in each]
        if all(each.get("deserted") for each in everyone) or not all(
            each["deserted"] for _, each in failed
        ):
            if failure is not None:
                raise failure
            rank, each = failed[0]
            raise CleaveError(f"server {rank + 1} of {len(everyone)} failed: {each['failed']}")
        if not all("done" in each for each in everyone):
            raise AbandonedError("one of the servers abandoned the current step")
        return [each["done"] for each in everyone]

    def deserted(self) -> bool:
        """Return True if this server (of several) has had no device for `GIVES_BACK_S` seconds."""
        if not self.several or self._capacity():
            self._deserted_since_s = None
            return False
        if self._deserted_since_s is None:
            self._deserted_since_s = self._clock()
        return self._clock() - self._deserted_since_s >= GIVES_BACK_S

    def counted(self, spent: FleetCounters) -> FleetCounters:
        """Combine all servers' counters of a step.

        Waiting times and the predicted duration are maxima. All other counters are sums.
        """
        if not self.several:
            return spent
        everyone = msgspec.convert(self._ranks.agree(asdict(spent)), list[FleetCounters])
        slowest = ("fleet_s", "waited_s", "predicted_s", "planning_s", "audit_s")
        return replace(
            sum(everyone[1:], everyone[0]),
            **{name: max(getattr(each, name) for each in everyone) for name in slowest},
        )

    def _capacity(self) -> float:
        """Return the fleet's capacity in FLOP/s; 1 for a server that computes without devices."""
        return 1.0 if self._fleet is None else self._fleet.capacity()

    def _now(self) -> float:
        """Return the current time in seconds, on the fleet's clock if that clock is virtual."""
        if self._fleet is not None and not self._on_wall_clock:
            return self._fleet.counters().fleet_s
        return self._clock()

    @property
    def _on_wall_clock(self) -> bool:
        return self._fleet is None or self._fleet.clock == "wall"
