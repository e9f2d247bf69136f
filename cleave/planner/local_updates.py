"""Predicts rounds of local updates (DiLoCo), in which devices train whole models alone."""

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

EVERY: Final = 50  # local steps of the fastest device in a round, unless the user says otherwise
_RETURNED: Final = 1 / 64  # part of the elements that a device returns if the exchange is sparse
_CHUNK: Final = 4096  # elements with one scale (down) or two scales (up), if the exchange is sparse
_FP32: Final = 4
# For each element that an update of AdamW changes: its gradient, its new weight and moments, and
# the working memory of the graph.
_UPDATE_BYTES: Final = 30
_ASYMMETRY: Final = 4  # usual ratio of downlink and uplink rates, if an exchange overlaps steps
_LOGIT_BYTES: Final = 12  # logits, their softmax and their gradient


class ExchangeKind(Enum):
    """Form of weights that rounds of local updates exchange. The values are those of `--exchange`.

    With `int8`, each block of up to 256 elements has one scale, and an element has 8 bits. With
    `sparse`, devices return one of 64 elements, as in SparseLoCo (arXiv 2508.15706), and get the
    elements that any device returned.
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
        """Return the bytes per parameter that a device gets. A sparse change is at its largest."""
        if self is not ExchangeKind.SPARSE:
            return self.up_bytes
        return 1 / 8 + min(1.0, devices * _RETURNED) + 4 / _CHUNK

    @property
    def held_bytes(self) -> int:
        """Return the bytes per parameter that a device holds.

        It holds the weight now and at the beginning of the round, two moments of AdamW and, if the
        exchange is sparse, what it has not returned.
        """
        return 20 if self is ExchangeKind.SPARSE else 16

    @property
    def coded_ratio(self) -> float:
        """Return the ratio of lossless compression on links that compress; 1 for codes."""
        plain = self in (ExchangeKind.FP32, ExchangeKind.BF16)
        return coded_ratio(self.value) if plain else 1.0


@dataclass(frozen=True, slots=True)
class Rounds:
    """How often and in which form rounds of local updates exchange weights.

    Attributes:
        every: local steps of the fastest device between two exchanges of the same parameter.
        fragments: number of parts of the model, which are exchanged one after the other, as in
            Streaming DiLoCo (arXiv 2501.18512). Each round exchanges one part.
        overlap: local steps between taking a difference and merging the server's change, during
            which they travel.

    Raises:
        UsageError: if the numbers do not go together.
    """

    every: int = EVERY
    exchange: ExchangeKind = ExchangeKind.BF16
    fragments: int = 1
    overlap: int = 0

    def __post_init__(self) -> None:
        if self.every % self.fragments:
            raise UsageError(
                f"--every is {self.every} and --fragments is {self.fragments}; give a multiple of "
                f"--fragments"
            )
        if self.overlap >= self.steps:
            raise UsageError(
                f"--overlap is {self.overlap}, and exchanges are {self.steps} steps apart; give "
                f"less than that"
            )

    @property
    def steps(self) -> int:
        """Return the local steps of the fastest device between two exchanges."""
        return self.every // self.fragments

    def overlapped(self, devices: int) -> tuple[int, int]:
        """Return the local steps during a download, and those during an upload.

        They add up to `overlap`. Each has a share by the bytes in its direction and the usual rates
        of home links. The shares matter for the time of a round only, not for its result.
        """
        up_s, down_s = _ASYMMETRY * self.exchange.up_bytes, self.exchange.down_bytes(devices)
        during_upload = round(self.overlap * up_s / (up_s + down_s))
        return self.overlap - during_upload, during_upload


def planned_steps(steps_per_s: Mapping[int, float], every: int) -> dict[int, int]:
    """Return how many local steps each device does in a round, at least 1.

    The fastest device does `every` steps, and the others as many as they can do in that time
    (arXiv 2401.09135, section 5).

    Args:
        steps_per_s: the speed of each device, in any unit.
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
        exchange_s: part of `round_s` in which weights travel and no step runs, of the device that
            takes longest.
        tokens: tokens that all devices train on in a round.
        downlink_bytes, uplink_bytes: traffic of all devices in a round.
        device_bytes: memory that a device needs.
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
        """Return the predicted training throughput."""
        return self.tokens / self.round_s

    @property
    def why(self) -> str:
        """Return a clause, without a full stop, that names what takes most of a round."""
        share = self.exchange_s / self.round_s
        return (
            f"not exact, other losses: {self.tokens_per_s:,.0f} tokens/s; devices exchange weights "
            f"in {self.rounds.exchange.value} every {self.rounds.every} steps, and wait for them "
            f"{share:.0%} of the time"
        )


def plan_round(
    model: StageModel,
    elements: int,
    devices: Sequence[DeviceRates],
    card: PsRates | None,
    rounds: Rounds,
    batches: int = 1,
) -> LocalPlan:
    """Predict a round in which each device's local step has `batches` micro-batches of `model`.

    Devices with too little memory take no part.

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
    if rounds.overlap:  # a difference and what travels of it, while steps run
        passes += (_FP32 + rounds.exchange.up_bytes) * elements / rounds.fragments
    needed_bytes = round(needed_bytes + max(passes, _UPDATE_BYTES * largest))
    kept_bytes = round(tokens * math.fsum(layer.activation_bytes for layer in model.layers))
    able = [device for device in devices if device.memory_bytes >= needed_bytes]
    if not able:
        raise DeviceMemoryError(
            f"each device holds the whole model, which takes {needed_bytes / 1e6:,.0f} MB, and no "
            f"device offers that"
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
        waits_s = max(0.0, down_s - during_download * step_s)
        waits_s += max(0.0, up_s - during_upload * step_s)
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
