"""What of a model went to a fleet and what stayed here, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

LEAST_SHARE: Final = 0.9
"""Of the parameters that multiply; `offload` warns where fewer went to the fleet."""

_LISTED: Final = 8  # layers that stayed here


@dataclass(frozen=True, slots=True)
class Stayed:
    """A module whose parameters stayed here.

    Attributes:
        parameters: how many, without those of modules within it.
        reason: why, in words.
        multiplies: whether the fleet is missed: it multiplies by them.
    """

    parameters: int
    reason: str
    multiplies: bool


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """What `cleave.offload` did; printed, it is a table.

    Attributes:
        method: `tiles` or `stages`.
        sent: parameters by the name of the module that multiplies by them on the fleet. By stages
            it is empty: whole layers go, and which can is known at the first forward pass.
        stayed: the other modules that have parameters, by name.
        min_flops: products of fewer floating-point operations are computed here, whatever they
            multiply by.
    """

    method: str
    sent: Mapping[str, int]
    stayed: Mapping[str, Stayed]
    min_flops: float = 0.0

    @property
    def share(self) -> float:
        """Return which share of the parameters that multiply is on the fleet; 1 if none does."""
        sent = sum(self.sent.values())
        missed = sum(each.parameters for each in self.stayed.values() if each.multiplies)
        return sent / (sent + missed) if sent + missed else 1.0

    @property
    def shortfall(self) -> str:
        """Return what is amiss where much stayed here, as a sentence; else nothing."""
        missed = {n: each for n, each in self.stayed.items() if each.multiplies}
        if self.share >= LEAST_SHARE or not missed:
            return ""
        name, most = max(missed.items(), key=lambda item: item[1].parameters)
        return (
            f"only {self.share:.0%} of the parameters that multiply went to the fleet; the most "
            f"that stayed here are those of {name!r}: {most.reason}"
        )

    def __str__(self) -> str:
        if self.method != "tiles":
            return "whole layers go to the fleet from the first forward pass on"
        count, total = len(self.sent), sum(self.sent.values())
        lines = [f"to the fleet: {count:,} layers, {total:,} parameters ({self.share:.0%})"]
        largest = sorted(self.stayed.items(), key=lambda item: -item[1].parameters)
        for name, each in largest[:_LISTED]:
            lines.append(f"here: {name}, {each.parameters:,} parameters: {each.reason}")
        if rest := largest[_LISTED:]:
            parameters = sum(each.parameters for _, each in rest)
            lines.append(f"here: {len(rest):,} more modules, {parameters:,} parameters")
        if self.min_flops:
            lines.append(f"here: products of fewer than {self.min_flops:,.0f} operations")
        return "\n".join(lines)
