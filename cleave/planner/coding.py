"""When payloads are coded (`cleave.coding`), and how much less then travels. Pure.

There is one rule for all: the server decides by it, and planner, emulator and simulator count by
it. Ratios are means of whole steps of training, as

    python -m benchmarks.coding

measures them for the tiny OPT and Llama after 200 steps. Integers are not coded, and what is short
(`cleave.protocol.limits.CODED_LEAST_BYTES`) is not; plans leave the latter out, for it is little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Final

from cleave.errors import choice_of
from cleave.planner.plan import DeviceRates, PsRates

LINK_BYTES_PER_S: Final = 37.5e6
"""Links that are faster get plain payloads. Up to here (300 Mbit/s) coding saves more time than one
core takes to code and to decode, even where neither happens while the link is busy: see
`benchmarks/coding.py`."""

RATIOS: Final = {"bf16": 0.675, "fp32": 0.837, "fp16": 0.81}
"""Coded over plain bytes by dtype, in training."""

PARTIAL: Final = "fp32"
"""The dtype of partial sums of tiles."""


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
        return choice_of(cls, "--coding", value)

    def pays(self, bytes_per_s: float) -> bool:
        """Say whether payloads are coded on a link of this rate."""
        if self is CodingPolicy.AUTO:
            return bytes_per_s <= LINK_BYTES_PER_S
        return self is CodingPolicy.ON

    def decided(
        self, device: DeviceRates, card: PsRates | None = None, devices: int = 1
    ) -> DeviceRates:
        """Return a device that can code, with which of its directions are coded.

        A device's link is no faster than its share of the server's network card while all are busy.

        Args:
            device: by its own link.
            card: the server's; None for no limit.
            devices: how many share it, at least 1.
        """
        card = card or PsRates()
        down = min(device.downlink_bytes_per_s, card.egress_bytes_per_s / devices)
        up = min(device.uplink_bytes_per_s, card.ingress_bytes_per_s / devices)
        return replace(device, codes_downlink=self.pays(down), codes_uplink=self.pays(up))


def coded_ratio(dtype: str) -> float:
    """Return the coded size of an array of a dtype over its plain size; 1 for integers."""
    return RATIOS.get(dtype, 1.0)


def payload_rates(
    devices: Sequence[DeviceRates], sent: str, returned: str = PARTIAL
) -> list[DeviceRates]:
    """Return devices with links as fast as they are for payloads: a link's rate over the ratio.

    For plans that count plain bytes. A network card that devices share has no such rates: it is
    planned with as if all that passes it were plain.

    Args:
        devices: by their links.
        sent: the dtype of what they are sent.
        returned: the dtype of what they return. Tiles return finished blocks and partial sums; both
            are taken to save no more than sums do.
    """
    return [
        replace(
            device,
            downlink_bytes_per_s=device.downlink_bytes_per_s
            / device.down_bytes(1.0, coded_ratio(sent)),
            uplink_bytes_per_s=device.uplink_bytes_per_s
            / device.up_bytes(1.0, coded_ratio(returned)),
            codes_downlink=False,
            codes_uplink=False,
        )
        if device.codes_downlink or device.codes_uplink
        else device
        for device in devices
    ]
