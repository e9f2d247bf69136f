"""Train transformers exactly on fleets of edge devices.

    fleet = cleave.emulated(8)            # or cleave.serve(port=8765).fleet: devices that join
    cleave.offload(model, fleet)          # every nn.Linear now multiplies on the fleet
    ...                                   # your own training loop
    cleave.restore(model)                 # the plain model again

`import cleave` is cheap; torch is imported when something that needs it is used.

The package logs under the name `cleave`, and prints nothing unless `logging` is told to.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cleave.server.fleet_server import serve
    from cleave.training.offload import offload, restore
    from emulator.virtual import emulated

__version__ = "0.1.0"
__all__ = ["__version__", "emulated", "offload", "restore", "serve"]

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    import importlib

    homes = {
        "offload": "cleave.training.offload",
        "restore": "cleave.training.offload",
        "serve": "cleave.server.fleet_server",
        "emulated": "emulator.virtual",
    }
    if name not in homes:
        raise AttributeError(f"module 'cleave' has no attribute {name!r}")
    return getattr(importlib.import_module(homes[name]), name)
