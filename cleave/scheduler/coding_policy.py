"""When payloads are coded (`cleave.coding`): where a link takes longer than coding does. Pure."""

from __future__ import annotations

from enum import Enum
from typing import Final

from cleave.errors import UsageError

LINK_BYTES_PER_S: Final = 37.5e6
"""Links that are faster get plain payloads. Up to here (300 Mbit/s) coding saves more time than one
core takes to code and to decode, even where neither happens while the link is busy: see
`benchmarks/coding.py`."""


class CodingPolicy(Enum):
    """On which links payloads are coded; the values are those of `--coding`."""

    AUTO = "auto"
    """On those that are slow enough."""

    ON = "on"
    OFF = "off"

    @classmethod
    def of(cls, value: CodingPolicy | str) -> CodingPolicy:
        """Read a value of `--coding`.

        Raises:
            UsageError: when it is none.
        """
        try:
            return cls(value)
        except ValueError:
            raise UsageError(f"--coding is {value!r}; use auto, on or off") from None

    def pays(self, bytes_per_s: float) -> bool:
        """Say whether payloads are coded on a link of this rate."""
        if self is CodingPolicy.AUTO:
            return bytes_per_s <= LINK_BYTES_PER_S
        return self is CodingPolicy.ON
