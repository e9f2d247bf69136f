"""What a layer's graphs take of the memory of a process that runs nothing else, as JSON.

    python -m benchmarks.graph_memory FOLDER

The folder holds the graphs `forward` and `backward`, and `inputs.npz`, all of their inputs by name.
Both are run twice in turn, as on a device, sums in place. Linux only; torch is not imported.
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
    """Write what `measure` reads."""
    for name, model in zip(_GRAPHS, (forward, backward), strict=True):
        (folder / name).write_bytes(model)
    np.savez(folder / "inputs.npz", allow_pickle=False, **inputs)


def measure(folder: Path) -> dict[str, object]:
    """Run the graphs in this process.

    Returns:
        `before`: resident bytes once there were the sessions and their inputs; `most`: at most
        since; `seconds`: of the last run of each graph.
    """
    with np.load(folder / "inputs.npz") as file:
        inputs = {name: file[name] for name in file.files}
    sessions = [GraphSession((folder / name).read_bytes()) for name in _GRAPHS]
    Path("/proc/self/clear_refs").write_text("5")  # what it was at most until now is forgotten
    before, took_s = resident_bytes("VmRSS"), []
    for session in sessions * _RUNS:
        into = {output: inputs[name] for output, name in session.in_place.items()}
        began_s = time.perf_counter()
        session.run_into(inputs, into)
        took_s.append(time.perf_counter() - began_s)
    most = resident_bytes("VmHWM")
    return {"before": before, "most": most, "seconds": took_s[-len(sessions) :]}


def resident_bytes(which: str) -> int:
    """Return a figure of this process in Linux's words, as VmRSS or VmHWM."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
