"""The computer of the parameter server (PS): its speed, and a device process that a job starts.

The measured operations use random data, and the dtype and threads of the training run. The matrices
have the widths of the run's matrices, up to fixed limits."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Final

from cleave.arrays import DType
from cleave.machine.backends import NumpyBackend, measure, sustained_s
from cleave.machine.graph_choice import GraphChoice
from cleave.machine.graph_trials import LARGEST_ERROR
from cleave.machine.sensors import available_memory_bytes, total_memory_bytes
from cleave.planner.stages.model import PsCompute

_STOP_S: Final = 10.0  # maximum wait for the process to exit before it is killed
_NICENESS: Final = 10  # the PS's own work takes precedence

_SHARE_OF_MEMORY: Final = 0.25  # maximum share of the computer's memory that the device offers
_SHARE_OF_AVAILABLE: Final = 0.5  # maximum share of the memory that nothing else needs


def offered_bytes(reserved_bytes: int) -> int:
    """Return how many bytes of memory a device on this computer offers; 0 if that is unknown.

    Args:
        reserved_bytes: additional memory that the PS itself will need, beyond what it uses now.
    """
    total, available = total_memory_bytes(), available_memory_bytes()
    if total is None or available is None:
        return 0
    spare = max(0, available - reserved_bytes)
    return round(min(_SHARE_OF_MEMORY * total, _SHARE_OF_AVAILABLE * spare))


def end_process(process: subprocess.Popen[Any], patience_s: float) -> None:
    """Terminate a process and wait until it exits. Kill the process after `patience_s` seconds."""
    process.terminate()
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _give_way(pid: int) -> None:
    """Let other processes have the processor first.

    Linux may divide it among sessions, and weigh each session's processes only with one another. So
    the session's weight is set, too.
    """
    os.setpriority(os.PRIO_PROCESS, pid, _NICENESS)
    with suppress(FileNotFoundError, PermissionError), open(f"/proc/{pid}/autogroup", "r+") as file:
        file.write(str(_NICENESS))


class OwnDevice:
    """A device process on the PS's computer. It connects to the PS like any other device.

    Args:
        command: command that starts the process, without the `--memory` option.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def runs(self) -> bool:
        """Return True if the process is running, even if it has not joined the fleet yet."""
        process = self._process
        return process is not None and process.poll() is None

    def start(self, memory_bytes: int) -> None:
        """Start the process if it is not running. The device offers `memory_bytes` bytes."""
        if self.runs:
            return
        # In a session or process group of its own, so that Ctrl-C stops the job before the device.
        group = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)  # on Windows
        self._process = subprocess.Popen(
            [*self._command, "--memory", str(memory_bytes // 10**6)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            creationflags=group,
        )
        if sys.platform != "win32":
            with suppress(ProcessLookupError):  # the process has already exited
                _give_way(self._process.pid)

    def stop(self) -> None:
        """Stop the process if it is running."""
        process, self._process = self._process, None
        if process is not None:
            end_process(process, _STOP_S)


_TOKENS: Final = 512
_TOKENS_OF_LOSS: Final = 256
_MOST_WIDTH: Final = 1024  # larger matrices take longer to measure, at the same speed
_MOST_INNER: Final = 4096
_MOST_VOCABULARY: Final = 16384
_PARAMETERS: Final = 2**21  # with optimizer state, far more than a processor's cache holds


@cache
def measured_server(
    width: int, inner: int, vocabulary: int, trained: int, dtype: DType
) -> PsCompute:
    """Measure the speed that this machine sustains as a PS. This takes about a second.

    Without torch, only multiplications are measured. The loss is then assumed to be as fast, and
    the optimizer to take no time.

    Args:
        width: elements per token of an activation between layers.
        inner: number of rows of the largest matrix in a layer.
        vocabulary: number of rows of the LM head.
        dtype: dtype of the multiplications. Parameters, gradients and the loss are in fp32.

    Example:
        >>> measured_server(768, 3072, 50272, 125_000_000, DType.FP32).flops_per_s
    """
    if importlib.util.find_spec("torch") is None:
        return PsCompute(measure(NumpyBackend(), dtype=dtype).flops_per_s, 0.0)
    width, inner = min(width, _MOST_WIDTH), min(inner, _MOST_INNER)
    vocabulary = min(vocabulary, _MOST_VOCABULARY)
    import torch

    # The measurement must not change the caller's random numbers.
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        layer_s = sustained_s(_layer(width, inner, dtype))
        loss_s = sustained_s(_loss(width, vocabulary, dtype))
        update_s = sustained_s(_update())
    return PsCompute(
        12 * _TOKENS * width * inner / layer_s,
        trained * update_s / _PARAMETERS,
        loss_flops_per_s=6 * _TOKENS_OF_LOSS * width * vocabulary / loss_s,
        graph_flops_per_s=graphs_here().flops_per_s(dtype if dtype is DType.BF16 else None),
        parameter_s=update_s / _PARAMETERS,
    )


@cache
def graphs_here() -> GraphChoice:
    """Return what runs graphs fastest on this machine. Only the first use of it measures.

    Audits use it, and they explain errors of devices up to `LARGEST_ERROR`. So the PS's own error
    must be much smaller.
    """
    return GraphChoice(largest_error=LARGEST_ERROR / 4)


def _layer(width: int, inner: int, dtype: DType) -> Callable[[], None]:
    """Return a function that runs the forward and backward passes of an MLP."""
    import torch
    import torch.nn.functional as F

    x = torch.randn(_TOKENS, width, requires_grad=True)
    first = torch.randn(inner, width, requires_grad=True)
    second = torch.randn(width, inner, requires_grad=True)
    narrow = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16}.get(dtype)

    def run() -> None:
        with torch.autocast("cpu", narrow, enabled=narrow is not None):
            y = F.linear(F.relu(F.linear(x, first)), second)
        torch.autograd.backward(y, torch.ones_like(y))

    return run


def _loss(width: int, vocabulary: int, dtype: DType) -> Callable[[], None]:
    """Return a function that runs the forward and backward passes of an LM head and its loss."""
    import torch
    import torch.nn.functional as F

    x = torch.randn(_TOKENS_OF_LOSS, width, requires_grad=True)
    head = torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.randint(vocabulary, (_TOKENS_OF_LOSS,))
    narrow = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16}.get(dtype)

    def run() -> None:
        with torch.autocast("cpu", narrow, enabled=narrow is not None):
            logits = F.linear(x, head)
        torch.autograd.backward(F.cross_entropy(logits.float(), targets))

    return run


def _update() -> Callable[[], None]:
    """Return a function that copies and clips one gradient and updates its parameter by AdamW."""
    import torch

    received = torch.randn(_PARAMETERS)
    parameter = torch.nn.Parameter(torch.randn(_PARAMETERS))
    optimizer = torch.optim.AdamW([parameter], fused=True)

    def run() -> None:
        parameter.grad = received.clone()
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        optimizer.step()

    return run
