"""Report of the modules that run on a fleet, and of the modules that run locally."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

LEAST_SHARE: Final = 0.9
"""Fraction of offloaded parameters below which `offload` warns.

Only parameters that multiply activations count.
"""

_LISTED: Final = 8  # maximum number of local modules that a report lists


@dataclass(frozen=True, slots=True)
class Stayed:
    """A module that is not offloaded.

    Attributes:
        parameters: number of the module's own parameters, without the parameters of submodules.
        reason: why the module is not offloaded.
        multiplies: whether the module multiplies activations by its parameters.
    """

    parameters: int
    reason: str
    multiplies: bool


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """Result of `cleave.offload`. `print` shows the report as text.

    Attributes:
        method: `tiles` or `stages`.
        sent: for the name of each offloaded module, its number of parameters. It is empty with
            stages, because the layers are not known before the first forward pass.
        stayed: the other modules that have parameters, by name; empty with stages.
        min_flops: GEMMs with fewer floating-point operations run locally.
    """

    method: str
    sent: Mapping[str, int]
    stayed: Mapping[str, Stayed]
    min_flops: float = 0.0

    @property
    def share(self) -> float:
        """Return the offloaded fraction of the parameters that multiply activations.

        It is 1 if the model has no such parameters.
        """
        sent = sum(self.sent.values())
        missed = sum(each.parameters for each in self.stayed.values() if each.multiplies)
        return sent / (sent + missed) if sent + missed else 1.0

    @property
    def shortfall(self) -> str:
        """Return a warning if `share` is below `LEAST_SHARE`; else an empty text."""
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
