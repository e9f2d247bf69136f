"""The choice of links with compressed payloads (`cleave.coding`), and the compression ratios.

The server decides by this rule, and planner, emulator and simulator count bytes by it. The ratios
are means over whole training steps of the tiny OPT and Llama after 200 steps, as measured by

    python -m benchmarks.coding

Integers and payloads below `cleave.protocol.limits.CODED_LEAST_BYTES` are not compressed. Plans
ignore the size limit, because small payloads are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Final

from cleave.errors import choice_of
from cleave.planner.plan import DeviceRates, PsRates

LINK_BYTES_PER_S: Final = 37.5e6
"""Up to this link rate (300 Mbit/s) compression saves more time than one core needs for it, even
without overlap with the transfer (see `benchmarks/coding.py`)."""

RATIOS: Final = {"bf16": 0.675, "fp32": 0.837, "fp16": 0.81}
"""Compressed size over plain size in training, by dtype."""

PARTIAL: Final = "fp32"
"""The dtype of the partial sums of tiles."""


class CodingPolicy(Enum):
    """The links on which payloads are compressed; the values are those of `--coding`."""

    AUTO = "auto"
    """Compress on links that are slow enough."""

    ON = "on"
    OFF = "off"

    @classmethod
    def of(cls, value: CodingPolicy | str) -> CodingPolicy:
        """Return the policy that `--coding` names.

        Raises:
            UsageError: when no policy has this name.
        """
        return choice_of(cls, "--coding", value)

    def pays(self, bytes_per_s: float) -> bool:
        """Return whether payloads are compressed on a link of this rate."""
        if self is CodingPolicy.AUTO:
            return bytes_per_s <= LINK_BYTES_PER_S
        return self is CodingPolicy.ON

    def decided(
        self, device: DeviceRates, card: PsRates | None = None, devices: int = 1
    ) -> DeviceRates:
        """Return the device with compression set for each of its directions.

        While all devices are busy, a link is no faster than its share of the server's network card.

        Args:
            device: a device that supports compression, with the rates of its own link.
            card: the server's network card; None if it has no limit.
            devices: number of devices that share the card, at least 1.
        """
        card = card or PsRates()
        down = min(device.downlink_bytes_per_s, card.egress_bytes_per_s / devices)
        up = min(device.uplink_bytes_per_s, card.ingress_bytes_per_s / devices)
        return replace(device, codes_downlink=self.pays(down), codes_uplink=self.pays(up))


def coded_ratio(dtype: str) -> float:
    """Return the compressed size over the plain size for a dtype; 1 for integers."""
    return RATIOS.get(dtype, 1.0)


def payload_rates(
    devices: Sequence[DeviceRates], sent: str, returned: str = PARTIAL
) -> list[DeviceRates]:
    """Return the devices with effective link rates: the link's rate over the compression ratio.

    Use them for plans that count plain bytes. The server's card has no effective rate: plans
    treat all of its traffic as plain.

    Args:
        devices: the devices with the rates of their links.
        sent: dtype of the payloads to the devices.
        returned: dtype of the payloads from the devices. Tiles return finished blocks and partial
            sums; the ratio of partial sums is used for both.
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
