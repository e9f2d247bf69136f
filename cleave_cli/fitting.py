"""Checks whether a training step fits in the memory of a server and its devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cleave.planner.forecast import Forecast
from cleave.planner.plan import Method
from cleave.workload.stages import StageSizes, recomputed_elements
from cleave_cli.options import human_bytes

_FP32_BYTES = 4
_STATE_BYTES = 8  # AdamW's two fp32 moments of one parameter


@dataclass(frozen=True, slots=True)
class Fit:
    """The memory requirement of a training method, and whether the machines have enough memory.

    Attributes:
        method: the training method.
        device_bytes: largest memory requirement of a device; 0 if no device is used.
        server_bytes: memory requirement of the server, if `cleave train` runs with `options`.
        fits: whether the devices and the server have enough memory.
        options: options of `cleave train` that reduce the server's memory requirement; empty if the
            defaults fit in memory.
        reason: why the step does not fit in memory; empty if it fits.
    """

    method: Method
    device_bytes: int
    server_bytes: int
    fits: bool
    options: tuple[str, ...] = ()
    reason: str = ""


def fit(each: Forecast, sizes: StageSizes, rows: int, sent: int, memory_bytes: int) -> Fit:
    """Return the memory requirement of a step by one method, and whether the step fits in memory.

    Args:
        each: the method's forecast, which is refused if the devices have too little memory.
        sizes: sizes of the model.
        rows: number of sequences in the batch.
        sent: bytes of one activation element.
        memory_bytes: memory of the server in bytes.
    """
    if each.refused:
        return Fit(each.method, 0, 0, fits=False, reason=each.refused)
    needed = [
        (max(0, each.server_bytes - saved), options)
        for saved, options in _savings(each, sizes, rows, sent)
    ]
    for server_bytes, options in needed:
        if server_bytes <= memory_bytes:
            return Fit(each.method, each.device_bytes, server_bytes, fits=True, options=options)
    least, options = needed[-1]
    reason = (
        f"the server needs {human_bytes(least)}, even with {' and '.join(options)}, and has "
        f"{human_bytes(memory_bytes)}"
    )
    return Fit(each.method, each.device_bytes, least, fits=False, options=options, reason=reason)


def _savings(
    each: Forecast, sizes: StageSizes, rows: int, sent: int
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield pairs: saved server memory in bytes, and the `cleave train` options that save it.

    The options with the smallest side effects come first.
    """
    trained = sizes.trained_parameters
    state = _STATE_BYTES * trained
    yield 0, ()
    if each.method is Method.STAGES:  # the PS has no activations or extra gradients to save
        yield state, ("--state-dir",)
        return
    recomputed = recomputed_elements(sizes.spec) * sent * rows * sizes.sequence
    lean = _FP32_BYTES * trained + recomputed  # frees each gradient after its use
    yield lean, ("--memory lean",)
    yield lean + state, ("--memory lean", "--state-dir")


def checkpoint_bytes(sizes: StageSizes) -> int:
    """Return the size of a checkpoint in bytes: trained fp32 weights and AdamW's moments."""
    return (_FP32_BYTES + _STATE_BYTES) * sizes.trained_parameters
