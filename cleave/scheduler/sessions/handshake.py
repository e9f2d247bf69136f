"""Checks a device's `hello` and returns the device's initial rates. No I/O."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cleave.arrays import DType
from cleave.errors import ProtocolError
from cleave.planner.plan import DeviceRates
from cleave.protocol import limits
from cleave.protocol.messages import ErrorCode, Hello, Op
from cleave.scheduler.sessions.admission import Refusal

_MOST_VERSIONS: Final = 8  # protocol versions listed in one message

FULL_RETRY_S: Final = 30.0
"""Seconds that a device should wait before it retries to join a full server."""

ASSUMED_FLOPS_PER_S: Final = 50e9
"""Assumed speed of a device that states no speed, in FLOP/s: a modest laptop."""


def unfit(hello: Hello, full_with: int | None) -> Refusal | None:
    """Return why a device cannot join, apart from its credentials; None if it can join.

    Args:
        full_with: the maximum number of devices if the server is full; None otherwise.

    Raises:
        ProtocolError: the `hello` lacks an operation or dtype that every device must support.
    """
    if hello.version != limits.VERSION:
        return Refusal(ErrorCode.VERSION, other_version(hello))
    if Op.MATMUL.value not in hello.ops or DType.FP32.value not in hello.dtypes:
        raise ProtocolError("a device needs op 'matmul' and dtype 'fp32'; this one lacks one")
    if hello.memory_bytes < limits.MIN_DEVICE_MEMORY_BYTES:
        reason = (
            f"the device offers {hello.memory_bytes} bytes of memory; "
            f"it must offer {limits.MIN_DEVICE_MEMORY_BYTES} or more"
        )
        return Refusal(ErrorCode.LIMIT, reason)
    if full_with is not None:
        reason = f"this server takes {full_with} devices and has them; try again later"
        return Refusal(ErrorCode.LIMIT, reason, FULL_RETRY_S)
    return None


def other_version(hello: Hello) -> str:
    """Return the error message for a client whose `hello` uses another protocol version."""
    if limits.VERSION in hello.versions:
        return (
            f"this {hello.role.value} said hello in protocol version {hello.version}; this server "
            f"speaks {limits.VERSION}, as the {hello.role.value} does, too: say hello in that"
        )
    spoken = ", ".join(str(v) for v in sorted({hello.version, *hello.versions[:_MOST_VERSIONS]}))
    return (
        f"this server speaks protocol version {limits.VERSION} and the {hello.role.value} speaks "
        f"{spoken}; install the same version of cleave on both"
    )


def stated_rates(session: int, hello: Hello) -> DeviceRates:
    """Return the rates stated in a `hello`, clipped to the protocol's limits.

    A device without a stated speed gets `ASSUMED_FLOPS_PER_S`.
    """
    return bounded(
        DeviceRates(
            device=session,
            downlink_bytes_per_s=hello.downlink_bytes_per_s,
            uplink_bytes_per_s=hello.uplink_bytes_per_s,
            flops_per_s=hello.flops_per_s or ASSUMED_FLOPS_PER_S,
            graph_flops_per_s=hello.graph_flops_per_s,
            latency_s=hello.latency_s,
            memory_bytes=hello.memory_bytes,
            dtypes=hello.dtypes,
        )
    )


def bounded(rates: DeviceRates) -> DeviceRates:
    """Return rates clipped to the protocol's limits."""
    return replace(
        rates,
        downlink_bytes_per_s=_within(limits.MIN_BYTES_PER_S, rates.downlink_bytes_per_s),
        uplink_bytes_per_s=_within(limits.MIN_BYTES_PER_S, rates.uplink_bytes_per_s),
        flops_per_s=_within(limits.MIN_FLOPS_PER_S, rates.flops_per_s),
        graph_flops_per_s=_within(limits.MIN_FLOPS_PER_S, rates.graph_flops_per_s)
        if rates.graph_flops_per_s > 0
        else 0.0,
        latency_s=min(limits.MAX_LATENCY_S, rates.latency_s),
    )


def _within(least: float, value: float) -> float:
    return min(limits.MAX_PER_S, max(least, value))
