"""What the edge-sustainability paper (arXiv 2507.01803) trained, and what stands in here.

Known are the models, the devices and their numbers, batch, tokens, steps, the links and the power
of Wi-Fi. Not known are a device's memory, power and speed of multiplication, nor the format of
numbers.
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
"""Of what a machine reaches in multiplication alone, in training: of GPU and devices alike."""
OTHER_SHARES: Final = (0.25, 1.0)


@dataclass(frozen=True, slots=True)
class Offer:
    """How much memory each device gives to training.

    Attributes:
        title: the terms on which it is given, for people.
    """

    title: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Setup:
    """One experiment.

    Attributes:
        title: the devices, for people.
        profile: the profile that stands for each of them.
        offers: offers of memory, the larger one first.
        trains_slower: whether the profile's speed is that of multiplication alone, so that training
            whole layers reaches only a share of it, as on the GPU; otherwise the speed was measured
            end to end.
        measured_flops_per_s: the slowest and the fastest figure of such devices in the library, or
            a maker's peak: the range of the sensitivity analysis.
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
        """Return the FLOP/s of one device in multiplication, at its sustained speed when hot."""
        model = self.profile.compute_model().model(DTYPE, DTYPE, Layout.NN)
        sustained = self.profile.sustained
        hot = sustained.thermal.sustained_speed if sustained and sustained.thermal else 1.0
        return model.flops_per_s * hot

    def rates(self, offer: Offer, speed: float = 1.0) -> list[DeviceRates]:
        """Return the devices' rates for the planner; latency is 0, as the paper states none.

        Args:
            speed: factor on their speed in multiplication.
        """
        link = LINK_BYTES_PER_S
        return [
            DeviceRates(number, link, link, self.flops_per_s * speed, 0.0, offer.memory_bytes)
            for number in range(self.devices)
        ]

    @property
    def name(self) -> str:
        """Return model and devices, for people."""
        return f"{self.model} on {self.title}"


@dataclass(frozen=True, slots=True)
class SetupScope:
    """What a report covers.

    Attributes:
        speeds: factors on the devices' speed in multiplication, to see how fast they must be.
    """

    setups: tuple[Setup, ...]
    speeds: tuple[float, ...]


def published() -> SetupScope:
    """Return the paper's experiments."""
    laptop, phone = load_profile("macbook-pro-14-m1-pro"), load_profile("snapdragon-888")
    laptops = (Offer("given over", 12_000_000_000), Offer("lent", laptop.memory.bytes))
    phones = (Offer("given over", 6_000_000_000), Offer("lent", phone.memory.bytes))
    # M2 measured in PyTorch to the datasheet's peak of an M2 Pro; this phone's GPU in ncnn, hot, to
    # the fastest phone that was measured.
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
    """Return one laptop and four phones with very small models, for a trial."""
    laptop, _, _, phones = published().setups
    setups = (
        replace(laptop, model="opt-nano", batch=4, seq=64, steps=2),
        replace(phones, model="opt-tiny", title="4 phones", devices=4, batch=4, seq=64, steps=2),
    )
    return SetupScope(setups, (1.0, 64.0))
