"""Whether a model fits a server and its devices: memory needed against memory available."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cleave.planner.forecast import Forecast
from cleave.planner.plan import Method
from cleave.workload.stages import StageSizes, recomputed_elements
from cleave_cli.options import human_bytes

_FP32_BYTES = 4
_STATE_BYTES = 8  # AdamW's two moments of a parameter, in fp32


@dataclass(frozen=True, slots=True)
class Fit:
    """Memory that a method needs, and whether the machines have it.

    Attributes:
        method: the method of training.
        device_bytes: memory of the device that needs most; 0 where no device is used.
        server_bytes: memory of the server when `cleave train` runs with `options`.
        fits: whether devices and server have enough memory.
        options: options that make it fit, where the defaults do not.
        reason: why it does not fit; empty where it does.
    """

    method: Method
    device_bytes: int
    server_bytes: int
    fits: bool
    options: tuple[str, ...] = ()
    reason: str = ""


def fit(each: Forecast, sizes: StageSizes, rows: int, sent: int, memory_bytes: int) -> Fit:
    """Return whether a step by one method fits.

    Args:
        each: the method's forecast, which already refuses devices with too little memory.
        sizes: sizes of the model.
        rows: sequences of the batch.
        sent: bytes of an element of activations.
        memory_bytes: memory of the server.
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
    """Yield the bytes that the server saves and the options that save them, mildest first."""
    trained = sizes.trained_parameters
    state = _STATE_BYTES * trained
    yield 0, ()
    if each.method is Method.STAGES:  # the PS keeps no activations or extra gradients
        yield state, ("--state-dir",)
        return
    recomputed = recomputed_elements(sizes.spec) * sent * rows * sizes.sequence
    lean = _FP32_BYTES * trained + recomputed  # each gradient is freed at once
    yield lean, ("--memory lean",)
    yield lean + state, ("--memory lean", "--state-dir")


def checkpoint_bytes(sizes: StageSizes) -> int:
    """Return the size of a checkpoint: trained weights and AdamW's moments."""
    return (_FP32_BYTES + _STATE_BYTES) * sizes.trained_parameters
