"""Report of the modules that went to a fleet, and of those that stayed local and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

LEAST_SHARE: Final = 0.9
"""Fraction of the multiplying parameters on the fleet below which `offload` warns."""

_LISTED: Final = 8  # local modules that a report lists


@dataclass(frozen=True, slots=True)
class Stayed:
    """A module that stayed local.

    Attributes:
        parameters: number of parameters, without those of its submodules.
        reason: why the module stayed.
        multiplies: whether the module multiplies by its parameters.
    """

    parameters: int
    reason: str
    multiplies: bool


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """Result of `cleave.offload`; `print` shows it as text.

    Attributes:
        method: `tiles` or `stages`.
        sent: number of parameters by name of the module on the fleet. Empty with stages, where
            the layers are known only at the first forward pass.
        stayed: other modules with parameters, by name; empty with stages.
        min_flops: products of fewer floating-point operations are computed locally.
    """

    method: str
    sent: Mapping[str, int]
    stayed: Mapping[str, Stayed]
    min_flops: float = 0.0

    @property
    def share(self) -> float:
        """Return the fraction of multiplying parameters on the fleet; 1 if none multiply."""
        sent = sum(self.sent.values())
        missed = sum(each.parameters for each in self.stayed.values() if each.multiplies)
        return sent / (sent + missed) if sent + missed else 1.0

    @property
    def shortfall(self) -> str:
        """Return a sentence if `share` is below `LEAST_SHARE`; else an empty text."""
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
