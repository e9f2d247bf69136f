"""The experiments of the edge-sustainability paper (arXiv 2507.01803), as simulator input.

The paper states the models, the types and numbers of devices, the batch size, tokens per sequence,
steps, link rates and Wi-Fi power. It states neither the dtype nor the devices' memory, power and
multiplication speed. Device profiles and assumptions of this project supply the missing values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cleave.planner.plan import DeviceRates
from profiles.device_profile import DeviceProfile
from profiles.library import load_profile
from profiles.performance import Layout

LINK_BYTES_PER_S: Final = 10e6
DTYPE: Final = "bf16"
GPU: Final = "a5000"
EQUAL_SHARE: Final = 0.5
"""Training speed divided by multiplication speed in the central case, for GPU and devices."""
OTHER_SHARES: Final = (0.25, 1.0)


@dataclass(frozen=True, slots=True)
class Setup:
    """One experiment of the paper.

    Attributes:
        title: number and type of devices, such as "4 laptops".
        profile: profile of every device.
        offers: bytes of memory that each device offers, with the largest offer first: devices that
            only train, and devices that are also in use.
        trains_slower: True if the profile's speed was measured in matrix multiplication alone, so
            training whole layers is slower. False if the speed was measured end to end.
        measured_flops_per_s: lowest and highest known speeds of similar devices.
        batch, seq: sequences per step, and tokens per sequence.
    """

    title: str
    model: str
    profile: DeviceProfile
    devices: int
    offers: tuple[int, ...]
    trains_slower: bool
    measured_flops_per_s: tuple[float, float]
    batch: int = 16
    seq: int = 512
    steps: int = 100

    @property
    def flops_per_s(self) -> float:
        """Return the throughput (FLOP/s) that one hot device sustains in matrix multiplication."""
        model = self.profile.compute_model().model(DTYPE, DTYPE, Layout.NN)
        sustained = self.profile.sustained
        hot = sustained.thermal.sustained_speed if sustained and sustained.thermal else 1.0
        return model.flops_per_s * hot

    def rates(self, memory_bytes: int, speed: float = 1.0) -> list[DeviceRates]:
        """Return the rates of all devices. Latencies are 0, because the paper does not state any.

        The multiplication speed of the devices is multiplied by `speed`.
        """
        link = LINK_BYTES_PER_S
        return [
            DeviceRates(number, link, link, self.flops_per_s * speed, 0.0, memory_bytes)
            for number in range(self.devices)
        ]

    @property
    def name(self) -> str:
        """Return a name, such as "opt-1.3b on 4 laptops"."""
        return f"{self.model} on {self.title}"


def published() -> tuple[Setup, ...]:
    """Return the paper's four experiments."""
    laptop, phone = load_profile("macbook-pro-14-m1-pro"), load_profile("snapdragon-888")
    laptops = (12_000_000_000, laptop.memory.bytes)
    phones = (6_000_000_000, phone.memory.bytes)
    # Laptops: from an M2 measured in PyTorch to the datasheet peak of the M2 Pro. Phones: from the
    # Snapdragon 888's GPU, hot, in ncnn to the fastest measured phone.
    laptop_speeds, phone_speeds = (2.0e12, 6.8e12), (0.5 * 3.47e10, 1.112e12)
    return (
        Setup("1 laptop", "opt-125m", laptop, 1, laptops, True, laptop_speeds),
        Setup("1 phone", "opt-125m", phone, 1, phones, False, phone_speeds),
        Setup("4 laptops", "opt-1.3b", laptop, 4, laptops, True, laptop_speeds),
        Setup("15 phones", "opt-1.3b", phone, 15, phones, False, phone_speeds),
    )
