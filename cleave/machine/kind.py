"""What kind of machine this is, as far as its system tells: for lists, and for its energy."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Final

from cleave.machine.sensors import Machine
from profiles.device_profile import DeviceKind

# What single-board computers are called in their device trees, with or without their maker's name.
# Phones, laptops and virtual machines have such a tree, too.
_BOARDS: Final = re.compile(
    r"\b(raspberry pi|orange ?pi|banana ?pi|rock ?pi|rock ?\d|rockpro|nanop[ic]|odroid|jetson|"
    r"orin\b|beagle|tinker board|visionfive|khadas|libre computer)",
    re.IGNORECASE,
)


def kind_of(machine: Machine, *, android: bool) -> DeviceKind | None:
    """Return the kind of a machine; None where nothing tells, as for desktops and servers.

    Args:
        machine: the machine, as it describes itself.
        android: whether it runs Android, where apps see little of the machine.
    """
    if android:
        return DeviceKind.PHONE
    if _BOARDS.search(machine.board):
        return DeviceKind.SBC
    return DeviceKind.LAPTOP if machine.has_battery else None


def on_android(platform: str = sys.platform, environ: Mapping[str, str] = os.environ) -> bool:
    """Say whether this is Android: Python says so from 3.13 on, Termux's runtime always."""
    return platform == "android" or "ANDROID_ROOT" in environ
