"""Predict rounds of local updates (DiLoCo), where devices train whole models alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from cleave.errors import DeviceMemoryError, UsageError
from cleave.planner.coding import coded_ratio
from cleave.planner.plan import DeviceRates, PsRates
from cleave.planner.stages.model import StageModel

EVERY: Final = 50  # default number of local steps per round on the fastest device
_RETURNED: Final = 1 / 64  # fraction of the elements that a device returns in a sparse exchange
_CHUNK: Final = 4096  # elements that share one scale (down) or two scales (up) in a sparse exchange
_FP32: Final = 4
# Memory per element that an AdamW update changes: gradient, new weight, new moments, and the
# graph's working memory.
_UPDATE_BYTES: Final = 30
_ASYMMETRY: Final = 4  # assumed ratio of downlink to uplink rate, for exchanges that overlap steps
_LOGIT_BYTES: Final = 12  # per logit: the logit, its softmax and its gradient


class ExchangeKind(Enum):
    """The format in which local updates exchange weights. The values are those of `--exchange`.

    With `int8`, an element has 8 bits, and each block of up to 256 elements shares one scale. With
    `sparse`, a device returns 1 of 64 elements, as in SparseLoCo (arXiv 2508.15706), and receives
    all elements that any device returned.
    """

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"
    SPARSE = "sparse"

    @property
    def up_bytes(self) -> float:
        """Return the bytes per parameter that a device returns, before lossless compression."""
        plain = {ExchangeKind.FP32: 4.0, ExchangeKind.BF16: 2.0, ExchangeKind.INT8: 1 + 4 / 256}
        return plain[self] if self in plain else 2 * _RETURNED + 8 / _CHUNK

    def down_bytes(self, devices: int) -> float:
        """Return the bytes per parameter that a device receives; the maximum if sparse."""
        if self is not ExchangeKind.SPARSE:
            return self.up_bytes
        return 1 / 8 + min(1.0, devices * _RETURNED) + 4 / _CHUNK

    @property
    def held_bytes(self) -> int:
        """Return the bytes per parameter that a device holds.

        These bytes are for the current weight, the weight at the start of the round, and two AdamW
        moments. With a sparse exchange, they include the change that the device has not returned
        yet.
        """
        return 20 if self is ExchangeKind.SPARSE else 16

    @property
    def coded_ratio(self) -> float:
        """Return the lossless compression ratio; 1 for quantized or sparse formats."""
        plain = self in (ExchangeKind.FP32, ExchangeKind.BF16)
        return coded_ratio(self.value) if plain else 1.0


@dataclass(frozen=True, slots=True)
class Rounds:
    """How often, and in which format, rounds of local updates exchange weights.

    Attributes:
        every: local steps of the fastest device between two exchanges of the same parameter.
        fragments: number of parts into which the model is divided. Each round exchanges the next
            part, as in Streaming DiLoCo (arXiv 2501.18512).
        overlap: local steps that run during an exchange, between computing a difference and merging
            the server's change.

    Raises:
        UsageError: if `every` is not a multiple of `fragments`, or `overlap` is too large.
    """

    every: int = EVERY
    exchange: ExchangeKind = ExchangeKind.BF16
    fragments: int = 1
    overlap: int = 0

    def __post_init__(self) -> None:
        if self.every % self.fragments:
            raise UsageError(
                f"--every ({self.every}) must be a multiple of --fragments ({self.fragments})"
            )
        if self.overlap >= self.steps:
            raise UsageError(
                f"--overlap ({self.overlap}) must be less than {self.steps}, the number of steps "
                f"between exchanges"
            )

    @property
    def steps(self) -> int:
        """Return the number of local steps between two exchanges, on the fastest device."""
        return self.every // self.fragments

    def overlapped(self, devices: int) -> tuple[int, int]:
        """Return the numbers of local steps during a download, and during an upload.

        The two numbers add up to `overlap`. They are proportional to the transfer times in both
        directions at the usual rates of home links. They affect the time of a round, but not its
        result.
        """
        up_s, down_s = _ASYMMETRY * self.exchange.up_bytes, self.exchange.down_bytes(devices)
        during_upload = round(self.overlap * up_s / (up_s + down_s))
        return self.overlap - during_upload, during_upload


def planned_steps(steps_per_s: Mapping[int, float], every: int) -> dict[int, int]:
    """Return the number of local steps in a round (at least 1), by device ID.

    The fastest device takes `every` steps. The other devices take as many steps as they can in the
    same time (arXiv 2401.09135, section 5).

    Args:
        steps_per_s: the speed of each device, by device ID. Only proportions matter.
    """
    fastest = max(steps_per_s.values(), default=0.0)
    return {
        device: max(1, min(every, round(every * speed / fastest)))
        for device, speed in steps_per_s.items()
    }


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """A predicted round of local updates.

    Attributes:
        steps: local steps of each device, by device ID.
        round_s: time of a round in seconds.
        exchange_s: part of `round_s` in which the slowest device only waits for transfers.
        tokens: tokens that all devices train on in a round.
        downlink_bytes, uplink_bytes: traffic of all devices in a round.
        device_bytes: memory that each device needs.
        server_bytes: memory of the server for weights, momentum and returned differences.
        flops: FLOPs of all devices in a round.
    """

    rounds: Rounds
    steps: Mapping[int, int]
    round_s: float
    exchange_s: float
    tokens: int
    downlink_bytes: int
    uplink_bytes: int
    device_bytes: int
    server_bytes: int
    flops: float

    @property
    def tokens_per_s(self) -> float:
        """Return the predicted training throughput of all devices together."""
        return self.tokens / self.round_s

    @property
    def why(self) -> str:
        """Return a clause that describes the exchange and its share of the time."""
        share = self.exchange_s / self.round_s
        return (
            f"not exact, so losses differ: {self.tokens_per_s:,.0f} tokens/s; devices exchange "
            f"weights in {self.rounds.exchange.value} every {self.rounds.every} steps, and spend "
            f"{share:.0%} of the time waiting for them"
        )


def plan_round(
    model: StageModel,
    elements: int,
    devices: Sequence[DeviceRates],
    card: PsRates | None,
    rounds: Rounds,
    batches: int = 1,
) -> LocalPlan:
    """Predict a round of local updates. Each local step has `batches` micro-batches of `model`.

    Devices with too little memory do not take part.

    Args:
        elements: number of trained parameters.
        devices: the devices, with rates for layer graphs in fp32.
        card: rates of the server's network card; None if it is never the bottleneck.

    Raises:
        DeviceMemoryError: if no device has enough memory.
    """
    tokens = max(model.tokens)
    parts = [*model.layers, model.loss]
    frozen = sum(part.frozen_bytes for part in parts)
    logits = _LOGIT_BYTES * model.most_slices
    inputs = 4 * model.width * len(model.layers)
    largest = min(elements, model.most_slices * model.width)  # elements of the embedding
    passes: float = _FP32 * elements + tokens * (logits + inputs)
    needed_bytes = rounds.exchange.held_bytes * elements + frozen
    if rounds.overlap:  # a difference and its encoded form, in memory while steps run
        passes += (_FP32 + rounds.exchange.up_bytes) * elements / rounds.fragments
    needed_bytes = round(needed_bytes + max(passes, _UPDATE_BYTES * largest))
    kept_bytes = round(tokens * math.fsum(layer.activation_bytes for layer in model.layers))
    able = [device for device in devices if device.memory_bytes >= needed_bytes]
    if not able:
        raise DeviceMemoryError(
            f"local updates need {needed_bytes / 1e6:,.0f} MB on each device for the whole model, "
            "but no device offers that much"
        )
    spared = math.fsum(layer.spared_flops for layer in model.layers)
    whole = math.fsum(part.flops for part in parts)
    flops = {
        d.device: batches
        * tokens
        * (whole - (spared if needed_bytes + kept_bytes <= d.memory_bytes else 0))
        for d in able
    }
    steps = planned_steps({d.device: d.flops_per_s / flops[d.device] for d in able}, rounds.steps)
    exchange, ratio = rounds.exchange, rounds.exchange.coded_ratio
    down_payload = exchange.down_bytes(len(able)) * elements / rounds.fragments
    up_payload = exchange.up_bytes * elements / rounds.fragments
    during_download, during_upload = rounds.overlapped(len(able))
    down, up, links_s, exchange_s, round_s = 0.0, 0.0, 0.0, 0.0, 0.0
    for device in able:
        down_bytes = device.down_bytes(down_payload, ratio)
        up_bytes = device.up_bytes(up_payload, ratio)
        down_s = down_bytes / device.downlink_bytes_per_s + device.latency_s
        up_s = up_bytes / device.uplink_bytes_per_s + device.latency_s
        step_s = flops[device.device] / device.flops_per_s
        # A slow device has fewer steps, and the last one before its difference overlaps nothing.
        last = min(during_upload, steps[device.device] - 1)
        first = min(during_download, steps[device.device] - 1 - last)
        waits_s = max(0.0, down_s - first * step_s) + max(0.0, up_s - last * step_s)
        took_s = waits_s + steps[device.device] * step_s
        if took_s > round_s:
            round_s, exchange_s, links_s = took_s, waits_s, down_s + up_s
        down, up = down + down_bytes, up + up_bytes
    if card is not None:
        at_card_s = down / card.egress_bytes_per_s + up / card.ingress_bytes_per_s
        more_s = max(0.0, at_card_s - links_s)
        round_s, exchange_s = round_s + more_s, exchange_s + more_s
    return LocalPlan(
        rounds,
        steps,
        round_s,
        exchange_s,
        batches * tokens * sum(steps.values()),
        round(down),
        round(up),
        needed_bytes,
        round((3 * 4 + len(able) * exchange.up_bytes) * elements),
        sum(count * flops[device] for device, count in steps.items()),
    )
