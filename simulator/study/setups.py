"""The experiments of the edge-sustainability paper (arXiv 2507.01803), and their stand-ins.

The paper states models, devices and their numbers, batch, tokens, steps, links and Wi-Fi power. It
does not state a device's memory, power or multiplication speed, nor the number format.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from cleave.planner.plan import DeviceRates
from profiles.device_profile import DeviceProfile
from profiles.library import load_profile
from profiles.performance import Layout

LINK_BYTES_PER_S: Final = 10e6
DTYPE: Final = "bf16"
GPU: Final = "a5000"
EQUAL_SHARE: Final = 0.5
"""Training speed as a share of the speed in multiplication alone, for GPU and devices alike."""
OTHER_SHARES: Final = (0.25, 1.0)


@dataclass(frozen=True, slots=True)
class Offer:
    """An amount of memory that each device gives to training.

    Attributes:
        title: display name of the terms, such as "lent".
    """

    title: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Setup:
    """One experiment.

    Attributes:
        title: display name of the devices.
        profile: profile that represents each device.
        offers: offers of memory, the larger one first.
        trains_slower: whether the profile's speed is that of multiplication alone, so that training
            whole layers reaches only a share, as on the GPU. Otherwise the speed was measured end
            to end.
        measured_flops_per_s: slowest and fastest figure for such devices in the library, or a
            maker's peak; the range of the sensitivity analysis.
    """

    title: str
    model: str
    profile: DeviceProfile
    devices: int
    offers: tuple[Offer, ...]
    trains_slower: bool
    measured_flops_per_s: tuple[float, float]
    batch: int = 16
    seq: int = 512
    steps: int = 100

    @property
    def flops_per_s(self) -> float:
        """Return the FLOP/s of one device in multiplication, sustained when hot."""
        model = self.profile.compute_model().model(DTYPE, DTYPE, Layout.NN)
        sustained = self.profile.sustained
        hot = sustained.thermal.sustained_speed if sustained and sustained.thermal else 1.0
        return model.flops_per_s * hot

    def rates(self, offer: Offer, speed: float = 1.0) -> list[DeviceRates]:
        """Return the devices' rates for the planner; latency is 0 because the paper states none.

        Args:
            speed: factor on the devices' speed in multiplication.
        """
        link = LINK_BYTES_PER_S
        return [
            DeviceRates(number, link, link, self.flops_per_s * speed, 0.0, offer.memory_bytes)
            for number in range(self.devices)
        ]

    @property
    def name(self) -> str:
        """Return the display name: model and devices."""
        return f"{self.model} on {self.title}"


@dataclass(frozen=True, slots=True)
class SetupScope:
    """The scope of a report.

    Attributes:
        speeds: factors on the devices' speed in multiplication, to find the speed they need.
    """

    setups: tuple[Setup, ...]
    speeds: tuple[float, ...]


def published() -> SetupScope:
    """Return the paper's experiments."""
    laptop, phone = load_profile("macbook-pro-14-m1-pro"), load_profile("snapdragon-888")
    laptops = (Offer("given over", 12_000_000_000), Offer("lent", laptop.memory.bytes))
    phones = (Offer("given over", 6_000_000_000), Offer("lent", phone.memory.bytes))
    # Laptops: M2 measured in PyTorch to the M2 Pro's datasheet peak. Phones: this phone's GPU in
    # ncnn, hot, to the fastest phone measured.
    laptop_speeds, phone_speeds = (2.0e12, 6.8e12), (0.5 * 3.47e10, 1.112e12)
    return SetupScope(
        (
            Setup("1 laptop", "opt-125m", laptop, 1, laptops, True, laptop_speeds),
            Setup("1 phone", "opt-125m", phone, 1, phones, False, phone_speeds),
            Setup("4 laptops", "opt-1.3b", laptop, 4, laptops, True, laptop_speeds),
            Setup("15 phones", "opt-1.3b", phone, 15, phones, False, phone_speeds),
        ),
        tuple(2.0**power for power in range(-1, 8)),
    )


def quick() -> SetupScope:
    """Return a quick scope: one laptop and four phones with very small models."""
    laptop, _, _, phones = published().setups
    setups = (
        replace(laptop, model="opt-nano", batch=4, seq=64, steps=2),
        replace(phones, model="opt-tiny", title="4 phones", devices=4, batch=4, seq=64, steps=2),
    )
    return SetupScope(setups, (1.0, 64.0))
