"""The kind of machine that this is, as far as the system tells; used in lists and for energy."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Final

from cleave.machine.sensors import Machine
from profiles.device_profile import DeviceKind

# Names of single-board computers in their device trees, with or without the maker's name. Phones,
# laptops and virtual machines also have a device tree.
_BOARDS: Final = re.compile(
    r"\b(raspberry pi|orange ?pi|banana ?pi|rock ?pi|rock ?\d|rockpro|nanop[ic]|odroid|jetson|"
    r"orin\b|beagle|tinker board|visionfive|khadas|libre computer)",
    re.IGNORECASE,
)


def kind_of(machine: Machine, *, android: bool) -> DeviceKind | None:
    """Return the kind of a machine; None if it is unknown, as for desktops and servers.

    Args:
        machine: the machine's description.
        android: whether it runs Android, where apps see little of the machine.
    """
    if android:
        return DeviceKind.PHONE
    if _BOARDS.search(machine.board):
        return DeviceKind.SBC
    return DeviceKind.LAPTOP if machine.has_battery else None


def on_android(platform: str = sys.platform, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this is Android. Python tells from 3.13 on, Termux's runtime always."""
    return platform == "android" or "ANDROID_ROOT" in environ
