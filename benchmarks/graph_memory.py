"""Print the memory that a layer's graphs take in a process of their own, as JSON.

    python -m benchmarks.graph_memory FOLDER

The folder holds the graphs `forward` and `backward`, and `inputs.npz` with all inputs by name. Both
run twice in turn, as on a device, with sums in place. Linux only; torch is not imported.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import numpy as np

from cleave.machine.graph_session import GraphSession

_GRAPHS = ("forward", "backward")
_RUNS = 2


def write(folder: Path, forward: bytes, backward: bytes, inputs: dict[str, np.ndarray]) -> None:
    """Write the files that `measure` reads."""
    for name, model in zip(_GRAPHS, (forward, backward), strict=True):
        (folder / name).write_bytes(model)
    np.savez(folder / "inputs.npz", allow_pickle=False, **inputs)


def measure(folder: Path) -> dict[str, object]:
    """Run the graphs in this process.

    Returns:
        `before`: resident bytes with sessions and inputs loaded; `most`: peak since then;
        `seconds`: duration of the last run of each graph.
    """
    with np.load(folder / "inputs.npz") as file:
        inputs = {name: file[name] for name in file.files}
    sessions = [GraphSession((folder / name).read_bytes()) for name in _GRAPHS]
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before, took_s = resident_bytes("VmRSS"), []
    for session in sessions * _RUNS:
        into = {output: inputs[name] for output, name in session.in_place.items()}
        began_s = time.perf_counter()
        session.run_into(inputs, into)
        took_s.append(time.perf_counter() - began_s)
    most = resident_bytes("VmHWM")
    return {"before": before, "most": most, "seconds": took_s[-len(sessions) :]}


def resident_bytes(which: str) -> int:
    """Return a memory figure of this process in bytes by its Linux name, as VmRSS or VmHWM."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
