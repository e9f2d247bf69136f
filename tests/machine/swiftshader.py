"""Finds SwiftShader, a Vulkan driver in software that Chromium's package contains."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_ICD: Final = "vk_swiftshader_icd.json"
_FOLDERS: Final = ("/usr/lib/chromium", "/usr/lib/chromium-browser", "/opt/google/chrome")


def environment() -> dict[str, str] | None:
    """Return the variables with which WebGPU runs on SwiftShader; None if it is not installed."""
    for folder in _FOLDERS:
        if (icd := Path(folder) / _ICD).is_file():
            return {"VK_ICD_FILENAMES": str(icd), "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1"}
    return None
