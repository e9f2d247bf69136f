"""Summarize why a Ray process ended in one sentence, because Ray's error texts are pages long."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

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
_MOST_SHOWN: Final = 300  # characters

_NEED_LESS: Final = (
    "use fewer servers on a machine, a machine with more memory, or --memory sharded (Ray ends "
    "processes once more than a share of a machine's memory is in use: 0.95, unless its node was "
    "started with another RAY_memory_usage_threshold)"
)


@dataclass(frozen=True, slots=True)
class Ending:
    """The reason why a process ended, and advice for the user.

    Attributes:
        why: the reason, as a sentence without the final full stop.
        advice: what the user can do, as a sentence without the final full stop; empty if unknown.
    """

    why: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.why}; {self.advice}" if self.advice else self.why


def ending(text: str) -> Ending:
    """Extract the reason why a process ended from Ray's error text."""
    if used := _MEMORY.search(text):
        node, in_use, of = used.groups()
        why = f"the memory of {node} ran out ({in_use} of {of} GB were in use)"
        return Ending(why, _NEED_LESS)
    if any(sign in text for sign in _OUT_OF_MEMORY):
        return Ending("the memory of its machine ran out", _NEED_LESS)
    if any(sign in text for sign in _NODE_GONE):
        return Ending("its node of Ray's cluster is gone")
    raised = [found for found in _RAISED.findall(text) if found[0] not in _RAYS_OWN]
    if raised:
        return Ending(_short(f"{raised[-1][0]}: {raised[-1][1]}"))
    if any(sign in text for sign in _PROCESS_GONE):
        return Ending("its process was killed, or crashed", "the system's log may say more")
    if any(sign in text for sign in _SILENT):
        return Ending("its process does not answer, nor perhaps its node of Ray's cluster")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return Ending(_short(lines[0] if lines else "Ray does not say why"))


def lost_servers(errors: Mapping[int, BaseException]) -> dict[int, Ending]:
    """Return why server processes were lost, as a map from rank to reason.

    The map omits servers that failed with an exception of their own code, because these servers
    report the exception themselves.

    Args:
        errors: Ray Train's map from the rank of each failed server to its error.
    """
    return {
        rank: ending(str(getattr(error, "health_check_failure", error)))
        for rank, error in errors.items()
        if type(error).__module__.startswith("ray.")
    }


def _short(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} ..."
