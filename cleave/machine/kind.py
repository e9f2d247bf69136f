"""Detects the kind of this machine (phone, single-board computer or laptop).

The kind appears in lists of devices and is used to estimate energy.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Final

from cleave.machine.sensors import Machine
from profiles.device_profile import DeviceKind

# Matches the names of single-board computers in device trees, with or without the manufacturer's
# name. The presence of a device tree is not enough: phones, laptops and virtual machines also have
# device trees.
_BOARDS: Final = re.compile(
    r"\b(raspberry pi|orange ?pi|banana ?pi|rock ?pi|rock ?\d|rockpro|nanop[ic]|odroid|jetson|"
    r"orin\b|beagle|tinker board|visionfive|khadas|libre computer)",
    re.IGNORECASE,
)


def kind_of(machine: Machine, *, android: bool) -> DeviceKind | None:
    """Return the kind of a machine; None if it cannot be detected, as for desktops and servers.

    Args:
        machine: description of the machine.
        android: whether the machine runs Android. Android apps cannot read most hardware
            information, so every Android machine counts as a phone.
    """
    if android:
        return DeviceKind.PHONE
    if _BOARDS.search(machine.board):
        return DeviceKind.SBC
    return DeviceKind.LAPTOP if machine.has_battery else None


def on_android(platform: str = sys.platform, environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if this process runs on Android.

    Python reports the platform `android` since version 3.13. Termux always sets `ANDROID_ROOT`.
    """
    return platform == "android" or "ANDROID_ROOT" in environ
