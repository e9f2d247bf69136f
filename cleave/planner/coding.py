"""Choose the links on which payloads are compressed, and predict compression ratios.

The server, planner, emulator and simulator choose links by the same policy. Plans count every
payload on a chosen link as compressed by `cleave.coding`, although payloads below
`cleave.protocol.limits.CODED_LEAST_BYTES` are sent uncompressed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Final

from cleave.errors import choice_of
from cleave.planner.plan import DeviceRates, PsRates

# Highest rate at which compression pays off: 300 Mbit/s. Up to this rate, compression shortens
# the transfer by more than one CPU core's time for compressing (see `benchmarks/coding.py`).
LINK_BYTES_PER_S: Final = 37.5e6

# Compressed size divided by uncompressed size, by dtype: the mean over all payloads of a training
# step of the tiny models after 200 steps (measured with `python -m benchmarks.coding`).
RATIOS: Final = {"bf16": 0.675, "fp32": 0.837, "fp16": 0.81}
PARTIAL: Final = "fp32"  # dtype of the partial sums that devices return for tiles


class CodingPolicy(Enum):
    """The links on which payloads are compressed. The enum values are those of `--coding`."""

    AUTO = "auto"
    """Compress payloads on links whose rate is at most `LINK_BYTES_PER_S`."""

    ON = "on"
    OFF = "off"

    @classmethod
    def of(cls, value: CodingPolicy | str) -> CodingPolicy:
        """Convert a value of `--coding` to a policy.

        Raises:
            UsageError: if the value is not the name of a policy.
        """
        return choice_of(cls, "--coding", value)

    def pays(self, bytes_per_s: float) -> bool:
        """Return True if this policy compresses payloads on a link with the rate `bytes_per_s`."""
        if self is CodingPolicy.AUTO:
            return bytes_per_s <= LINK_BYTES_PER_S
        return self is CodingPolicy.ON

    def decided(
        self, device: DeviceRates, card: PsRates | None = None, devices: int = 1
    ) -> DeviceRates:
        """Return a copy of the device with compression enabled or disabled for each direction.

        The decision assumes that all devices are busy. Each device then gets at most an equal
        share of the rate of the server's network card.

        Args:
            device: a device that supports compression, with the rates of its own link.
            card: rates of the server's network card; None if it is never the bottleneck.
            devices: number of devices that share the card, at least 1.
        """
        card = card or PsRates()
        down = min(device.downlink_bytes_per_s, card.egress_bytes_per_s / devices)
        up = min(device.uplink_bytes_per_s, card.ingress_bytes_per_s / devices)
        return replace(device, codes_downlink=self.pays(down), codes_uplink=self.pays(up))


def coded_ratio(dtype: str) -> float:
    """Return the compression ratio of payloads of a dtype; 1 if the dtype is not in `RATIOS`."""
    return RATIOS.get(dtype, 1.0)


def payload_rates(
    devices: Sequence[DeviceRates], sent: str, returned: str = PARTIAL
) -> list[DeviceRates]:
    """Return the devices with effective link rates, for planners that ignore compression.

    An effective rate is the link rate divided by the compression ratio. The server's network card
    keeps its real rate, so these planners count all traffic through the card as uncompressed.

    Args:
        sent: dtype of the payloads that the server sends.
        returned: dtype that determines the compression ratio of all payloads that devices return.
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
