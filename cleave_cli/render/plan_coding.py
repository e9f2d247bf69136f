"""Output of the compression ratios that a plan assumes, and the number of compressed links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cleave.planner.coding import coded_ratio
from cleave_cli.options import counted

if TYPE_CHECKING:
    from cleave.planner.coding import CodingPolicy
    from cleave.planner.plan import DeviceRates


def coding_text(devices: Sequence[DeviceRates], dtypes: Sequence[str]) -> str:
    """Return a clause about compression, starting with ";"; empty if no link is compressed.

    Args:
        devices: the devices, with the compressed directions of their links.
        dtypes: dtypes of the payloads.
    """
    down, up = _links(devices)
    if not down + up:
        return ""
    ratios = " and ".join(
        f"{dtype} takes {coded_ratio(dtype):.3g} of its bytes" for dtype in dtypes
    )
    links = f"{counted(down, 'downlink')} and {counted(up, 'uplink')}"
    return f"; coded on {links}, where {ratios}"


def coding_json(
    policy: CodingPolicy, devices: Sequence[DeviceRates], dtypes: Sequence[str]
) -> dict[str, Any]:
    """Return the policy, the numbers of compressed links, and each dtype's ratio as JSON."""
    down, up = _links(devices)
    return {
        "policy": policy.value,
        "downlinks": down,
        "uplinks": up,
        "ratios": {dtype: coded_ratio(dtype) for dtype in dtypes},
    }


def _links(devices: Sequence[DeviceRates]) -> tuple[int, int]:
    down = sum(device.codes_downlink for device in devices)
    return down, sum(device.codes_uplink for device in devices)
