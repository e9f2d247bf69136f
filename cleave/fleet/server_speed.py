"""Measure the parts of a training step that the parameter server (PS) computes itself.

The measured operations use random data, and the dtype and threads of the training run. The matrices
have the widths of the run's matrices, up to fixed limits.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

from cleave.arrays import DType
from cleave.machine.backends import NumpyBackend, measure, sustained_s
from cleave.machine.graph_choice import GraphChoice
from cleave.machine.graph_trials import LARGEST_ERROR
from cleave.machine.load import OtherLoad
from cleave.planner.stages.model import PsCompute

_TOKENS: Final = 512
_TOKENS_OF_LOSS: Final = 256
_MOST_WIDTH: Final = 1024  # larger matrices take longer to measure, at the same speed
_MOST_INNER: Final = 4096
_MOST_VOCABULARY: Final = 16384
_MOST_TRIES: Final = 3  # while other programs use the processors; the fastest counts
_PAUSE_S: Final = 1.0  # between two tries
_PARAMETERS: Final = 2**21  # with optimizer state, far more than a processor's cache holds


@cache
def measured_server(
    width: int, inner: int, vocabulary: int, trained: int, dtype: DType
) -> PsCompute:
    """Measure the speed that this machine sustains as a PS. This takes about a second.

    While other programs use the processors, it takes some seconds: the fastest of several
    measurements counts.

    Without torch, only multiplications are measured. The loss is then assumed to run at the same
    speed, and the optimizer step to take no time.

    Args:
        width: elements per token of an activation between layers.
        inner: number of rows of the largest matrix in a layer.
        trained: number of trained parameters.
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

    # The measurement must not change the state of the caller's random generator.
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        parts = _layer(width, inner, dtype), _loss(width, vocabulary, dtype), _update()
        layer_s, loss_s, update_s = _shortest_s(parts)
    graphs, products = graphs_here(), dtype if dtype is DType.BF16 else None
    loss_flops_per_s = 6 * _TOKENS_OF_LOSS * width * vocabulary / loss_s
    if graphs.accelerates(products):
        loss_flops_per_s = max(loss_flops_per_s, graphs.flops_per_s(products))
    return PsCompute(
        12 * _TOKENS * width * inner / layer_s,
        trained * update_s / _PARAMETERS,
        loss_flops_per_s=loss_flops_per_s,
        graph_flops_per_s=graphs.flops_per_s(products),
        parameter_s=update_s / _PARAMETERS,
    )


def _shortest_s(parts: Sequence[Callable[[], None]]) -> list[float]:
    """Return the sustained durations of `parts` in seconds, the shortest of several if needed."""
    shortest_s = [float("inf")] * len(parts)
    for attempt in range(_MOST_TRIES):
        if attempt:
            time.sleep(_PAUSE_S)
        others = OtherLoad()
        shortest_s = [min(sustained_s(run), s) for run, s in zip(parts, shortest_s, strict=True)]
        if not others.disturbs():
            break
    return shortest_s


@cache
def graphs_here() -> GraphChoice:
    """Return the choice of the fastest graph runner on this machine, measured on first use.

    If this runner uses an accelerator, the PS also computes its loss there. Audits always use the
    runner. They accept errors of devices up to `LARGEST_ERROR`, so the PS's own error must be much
    smaller.
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
