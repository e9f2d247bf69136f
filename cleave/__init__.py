"""Train transformers on fleets of edge devices, with exact results.

    fleet = cleave.emulated(8)            # real devices: fleet = cleave.serve(port=8765).fleet
    fleet.wait_for(2)                     # wait until 2 devices are connected
    with cleave.offloaded(model, fleet):  # the fleet computes the GEMMs of every nn.Linear
        ...                               # your own training loop

`import cleave` is fast because torch is imported only when a function first needs it.

All loggers of the package are children of the logger `cleave`. Nothing is logged to the console
unless the application configures `logging`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cleave.errors import CleaveError, FleetError, PlanError, UsageError
    from cleave.fleet.fleet import Fleet
    from cleave.server.fleet_server import serve
    from cleave.training.lora.adapters import quantize
    from cleave.training.tiles.offload import hold_weights, offload, offloaded, restore
    from emulator.virtual import emulated

__version__ = "0.1.0"
__all__ = [
    "CleaveError", "Fleet", "FleetError", "PlanError", "UsageError", "__version__", "emulated",
    "hold_weights", "offload", "offloaded", "quantize", "restore", "serve",
]  # fmt: skip

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    import importlib

    homes = {
        **dict.fromkeys(("CleaveError", "FleetError", "PlanError", "UsageError"), "cleave.errors"),
        "Fleet": "cleave.fleet.fleet",
        **dict.fromkeys(
            ("hold_weights", "offload", "offloaded", "restore"), "cleave.training.tiles.offload"
        ),
        "quantize": "cleave.training.lora.adapters",
        "serve": "cleave.server.fleet_server",
        "emulated": "emulator.virtual",
    }
    if name in homes:
        return getattr(importlib.import_module(homes[name]), name)
    from difflib import get_close_matches

    close = get_close_matches(name, __all__, 1)
    meant = f"; did you mean {close[0]!r}?" if close and not name.startswith("_") else ""
    raise AttributeError(f"module 'cleave' has no attribute {name!r}{meant}")


def __dir__() -> list[str]:
    return sorted(__all__)
