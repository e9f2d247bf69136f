"""What one of several servers does of each step, and how all learn what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Final, Protocol, TypeVar

from cleave.errors import CleaveError, FleetError
from cleave.fleet.counters import FleetCounters
from cleave.fleet.local_fallback import AbandonedError
from cleave.scheduler.traffic import BytesByKind, Traffic
from cleave.training.data.batches import Batch
from cleave.training.loop.job_fleet import JobFleet
from cleave.training.servers.dealing import Dealer, Pace, part_of
from cleave.training.servers.ranks import LostServerError, Ranks

GIVES_BACK_S: Final = 10.0
"""So long without any device, and a server's part of a step is dealt to those that have some."""

_Value = TypeVar("_Value")


class Sums(Protocol):
    """Adds up the gradients of all servers, as `Optimizer` does."""

    @property
    def waited_s(self) -> float:
        """Return how long the backward pass of this step has waited for other servers."""
        ...

    def add_up(self) -> None:
        """Add up what is left; see `Optimizer.add_up`."""
        ...


class SharedSteps:
    """Deals each step's sequences to all servers by what their fleets do.

    Args:
        ranks: the servers.
        fleet: of this server; None where it computes itself.
        clock: in seconds.
        say: called, on the first server, when sequences are dealt in another way.

    Attributes:
        first_row: the number, within the step, of the first sequence of this server's part.
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
        self._pace = Pace()
        self._dealer = Dealer()
        self._say = say
        self._deserted_since_s: float | None = None
        self.first_row = 0

    @property
    def several(self) -> bool:
        """Say whether there is more than one server."""
        return self._ranks.count > 1

    def part(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return what this server does of a step's micro-batches; nothing, where it has no device.

        Args:
            batches: all of the step, the same on every server.
        """
        rows = sum(len(batch.ids) for batch in batches)
        self._deserted_since_s = None  # where no server has a device, each waits anew
        capacity = self._capacity()
        if capacity and not self._pace.rows_per_s:
            predicted_s = self._fleet.predicted_s(batches) if self._fleet is not None else rows
            self._pace.took(rows, predicted_s, capacity)
        speeds = self._ranks.agree(capacity * self._pace.rows_per_s)
        before = self._dealer.dealt
        dealt = self._dealer.next(rows, speeds)
        if dealt != before and not self._ranks.rank:
            self._say(f"the servers do {' + '.join(map(str, dealt))} sequences of each step")
        self.first_row = sum(dealt[: self._ranks.rank])
        return part_of(batches, dealt, self._ranks.rank)

    def turns(self) -> tuple[int, int | None, int]:
        """Return which of some things this server does, as the arguments of a slice.

        Servers that could do something now take turns; where none could, all do.
        """
        self._deserted_since_s = None
        able = self._ranks.agree(self._capacity() > 0)
        servers = [rank for rank, can in enumerate(able) if can] or list(range(len(able)))
        if self._ranks.rank not in servers:
            return 0, 0, 1
        return servers.index(self._ranks.rank), None, len(servers)

    def do(self, part: Sequence[Batch], work: Callable[[], float], sums: Sums) -> float:
        """Do this server's part of a step, and note how long it took.

        Args:
            part: what it is.
            work: computes its gradients; returns what it adds to the loss.
            sums: adds up the gradients of all servers.

        Returns:
            The loss of the whole step.

        Raises:
            AbandonedError: when the step is to be done again, or not at all: nothing was updated.
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
                sums.add_up()  # others wait for what this server has of it
                raise
            took_s = self._now() - began_s
            if self._on_wall_clock:
                took_s -= sums.waited_s
            sums.add_up()
            return loss

        losses = self.together(timed)
        self._pace.took(sum(len(batch.ids) for batch in part), took_s, capacity)
        return sum(losses)

    def together(self, work: Callable[[], _Value]) -> list[_Value]:
        """Return what each server's part of something came to, which JSON can hold.

        Raises:
            AbandonedError: on all, when one gave up its part, or has no device left for it.
            CleaveError: on all, when one failed.
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
            raise AbandonedError("the step under way was given up by one of the servers")
        return [each["done"] for each in everyone]

    def deserted(self) -> bool:
        """Say whether this server should leave its part of a step to servers that have devices."""
        if not self.several or self._capacity():
            self._deserted_since_s = None
            return False
        if self._deserted_since_s is None:
            self._deserted_since_s = self._clock()
        return self._clock() - self._deserted_since_s >= GIVES_BACK_S

    def counted(self, spent: FleetCounters) -> FleetCounters:
        """Return what all fleets did together; its seconds are those of the slowest."""
        if not self.several:
            return spent
        everyone = [_counters(values) for values in self._ranks.agree(asdict(spent))]
        return replace(
            sum(everyone[1:], everyone[0]),
            fleet_s=max(each.fleet_s for each in everyone),
            waited_s=max(each.waited_s for each in everyone),
        )

    def _capacity(self) -> float:
        """Return what the fleet could do: in FLOP/s, or 1 for a server that computes itself."""
        return 1.0 if self._fleet is None else self._fleet.capacity()

    def _now(self) -> float:
        """Return seconds on the clock that counts: of the fleet, where that is a virtual one."""
        if self._fleet is not None and not self._on_wall_clock:
            return self._fleet.counters().fleet_s
        return self._clock()

    @property
    def _on_wall_clock(self) -> bool:
        return self._fleet is None or self._fleet.clock == "wall"


def _counters(values: dict[str, Any]) -> FleetCounters:
    """Make counters again of their values."""
    traffic = {
        name: Traffic(*(BytesByKind(**values[name][way]) for way in ("down", "up")))
        for name in ("traffic", "saved")
    }
    return FleetCounters(**{**values, **traffic})
