"""Start servers on a Ray cluster, and collect what they report.

Servers start once the cluster has enough free cores, or the user stops the wait. Ray Train itself
would wait forever, so each attempt is a separate run with a time limit. A Ray actor collects
training records and the reasons why servers were lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cleave.energy.run_energy import RunEnergy, in_succession
from cleave.errors import UsageError
from cleave.training.loop.records import NoteRecord, Record

MOST_FAILED: Final = 3
"""Number of consecutive failed starts, despite enough free cores, after which training ends."""

TRY_S: Final = "20"  # maximum time that a Ray Train run waits for free cores, in seconds
_NO_ROOM: Final = "WorkerGroupStartupTimeoutError"
_NOT_STARTED: Final = "WorkerGroupStartupFailedError"
"""Class names of internal Ray Train errors. A public `ControllerError` wraps them."""


def fitted(
    fit: Callable[[], object],
    stops: Callable[[], bool],
    waits: Callable[[], None],
    failed: Callable[[BaseException], None],
) -> bool:
    """Call `fit` to train, and retry while the cluster has too few free cores.

    Also retry a few times if a worker exits before it trains, for example because its node is lost.
    Call `waits` before a retry due to too few cores, and `failed` before any other retry. Return
    True after training, or False if `stops` returned True before the workers started.

    Raises:
        Exception: the error from `fit`, if the workers had started, or after `MOST_FAILED`
            consecutive failed starts.
    """
    failures = 0
    while True:
        try:
            fit()
        except Exception as error:
            why = getattr(error, "controller_failure", None)
            failures = failures + 1 if type(why).__name__ == _NOT_STARTED else 0
            if type(why).__name__ not in (_NO_ROOM, _NOT_STARTED) or failures == MOST_FAILED:
                raise
            if stops():
                return False
            if failures:
                failed(error)
            else:
                waits()
        else:
            return True


def cores_of_nodes(ray: Any) -> list[int]:
    """Return each live node's number of CPU cores, including cores in use."""
    return [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]


def check_cores(nodes: Sequence[int], servers: int) -> None:
    """Raise UsageError if the nodes together have fewer than `servers` cores."""
    if sum(nodes) < servers:
        raise UsageError(
            f"--servers is {servers}, but the cluster has only {sum(nodes)} cores; use fewer "
            "servers, or add nodes with: ray start --address HOST:PORT"
        )


def no_room(nodes: Sequence[int], servers: int, cores: int) -> str:
    """Return a message that tells users that too few cores are free for the servers."""
    each = "1 core" if cores == 1 else f"{cores} cores"
    return (
        f"Ray has too few free cores for {servers} servers with {each} each: its nodes have "
        f"{sum(nodes)} in total, some perhaps in use; training continues once enough are free (add "
        "a node with: ray start --address HOST:PORT)"
    )


def cores_of_each(nodes: Sequence[int], servers: int) -> int:
    """Return the largest number of cores per server that lets all servers fit; at least 1."""
    for cores in range(max(nodes, default=1), 1, -1):
        if sum(node // cores for node in nodes) >= servers:
            return cores
    return 1


_MEMORY: Final = re.compile(
    r"Memory on the node \(IP: ([^,)]+)[^)]*\).{0,200}? was ([\d.]+) ?GB(?: used)? / ([\d.]+) ?GB",
    re.DOTALL,
)
_OUT_OF_MEMORY: Final = ("low on memory", "OutOfMemoryError", "memory pressure (OOM)")
_NODE_GONE: Final = ("node has died", "NodeDiedError")
_SILENT: Final = ("temporarily unavailable", "ActorUnavailableError")
_PROCESS_GONE: Final = ("unexpectedly exits", "worker process has died")
_RAISED: Final = re.compile(
    r"^(?:ray::.*?)?(?:\w+\.)*(\w+(?:Error|Exception)): (.+)$", re.MULTILINE
)
_RAYS_OWN: Final = ("RayTaskError", "RayActorError", "ActorDiedError", "ActorUnavailableError")
_MOST_SHOWN: Final = 300  # maximum length of a reason, in characters

_NEED_LESS: Final = (
    "use fewer servers per machine, a machine with more memory, or --memory sharded (Ray ends "
    "processes when a machine's memory use exceeds RAY_memory_usage_threshold, which is 0.95 by "
    "default)"
)


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a process exited, and advice for the user. Neither text ends with a full stop."""

    why: str
    advice: str = ""  # empty if unknown

    def __str__(self) -> str:
        return f"{self.why}; {self.advice}" if self.advice else self.why


def ending(text: str) -> Ending:
    """Extract the reason why a process exited from a long Ray error message."""
    if used := _MEMORY.search(text):
        node, in_use, of = used.groups()
        why = f"the memory of {node} ran out ({in_use} of {of} GB were in use)"
        return Ending(why, _NEED_LESS)
    if any(sign in text for sign in _OUT_OF_MEMORY):
        return Ending("the memory of its machine ran out", _NEED_LESS)
    if any(sign in text for sign in _NODE_GONE):
        return Ending("its node left the Ray cluster")
    raised = [found for found in _RAISED.findall(text) if found[0] not in _RAYS_OWN]
    if raised:
        return Ending(_short(f"{raised[-1][0]}: {raised[-1][1]}"))
    if any(sign in text for sign in _PROCESS_GONE):
        return Ending("its process was killed or crashed", "the system's log may say more")
    if any(sign in text for sign in _SILENT):
        return Ending("its process does not answer, and perhaps its Ray node does not either")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return Ending(_short(lines[0] if lines else "Ray does not say why"))


def lost_servers(errors: Mapping[int, BaseException]) -> dict[int, Ending]:
    """Return why server processes were lost, by rank. Skip errors raised by the servers' code."""
    return {
        rank: ending(str(getattr(error, "health_check_failure", error)))
        for rank, error in errors.items()
        if type(error).__module__.startswith("ray.")
    }


def _short(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} ..."


class Board:
    """Collects training records and server starts for the process that started training."""

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._starts: dict[int, int] = {}
        self._step = 0
        self._stopping = False
        self._failure = ""
        self._loss = ""
        self._ended = 0
        self._used: dict[int, RunEnergy] = {}

    def started(self, rank: int) -> int:
        """Increment and return a server's start count. A new step resets all counts to 1."""
        self._starts[rank] = self._starts.get(rank, 0) + 1
        return self._starts[rank]

    def say(self, record: Record, step: int) -> None:
        """Add a record. `step` is the step that the record reports as completed, or 0 if none."""
        self._records.append(record)
        if step > self._step:  # a step repeated after a restart does not count as progress
            self._step = step
            self._starts = dict.fromkeys(self._starts, 1)

    def take(self) -> list[Record]:
        """Return the records that were added since the last call."""
        taken, self._records = self._records, []
        return taken

    def stop(self) -> None:
        """Ask the servers to stop the training after the current step."""
        self._stopping = True

    def stopping(self) -> bool:
        """Return whether `stop` was called."""
        return self._stopping

    def end(self) -> None:
        """Record that a server has finished training, with or without success."""
        self._ended += 1

    def ended(self) -> int:
        """Return how many servers have finished training."""
        return self._ended

    def used(self, rank: int, energy: RunEnergy) -> None:
        """Add the energy that devices used in one run of a server process to the server's total."""
        before = [self._used[rank]] if rank in self._used else []
        self._used[rank] = in_succession([*before, energy])

    def energy(self) -> list[RunEnergy]:
        """Return the energy used by each server's devices, over all runs of the server process."""
        return list(self._used.values())

    def lost(self, rank: int, why: Ending) -> None:
        """Record why a server was lost and add a note that all servers restart."""
        self._loss = f"server {rank + 1}: {why}"
        note = f"server {rank + 1} was lost, so all servers restart: {why.why}"
        self._records.append(NoteRecord(note))

    def give_up(self, starts: int) -> None:
        """Mark the training as failed because a server started `starts` times without progress."""
        last = f"; the last time, {self._loss}" if self._loss else ""
        self.fail(f"the servers were lost {starts} times without completing a step{last}")

    def fail(self, text: str) -> None:
        """Mark the training as failed. Only the reason in the first call is stored."""
        self._failure = self._failure or text

    def failure(self) -> str:
        """Return why the training failed; empty if it has not failed."""
        return self._failure
