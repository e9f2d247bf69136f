"""Sum gradients over several servers during the backward pass (ZeRO, stage 2).

Once a parameter's gradient is complete, the gradient is reduced to the server that owns the
parameter. The other servers free their gradients (arXiv 1910.02054, section 5). All servers send
gradients in the order in which a backward pass completes them, from the last parameter to the
first. If a parameter gets no gradient in a pass, the gradients of all preceding parameters are sent
only after the pass.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn

from cleave.training.servers.ranks import Exchange, Ranks

BUCKET_BYTES: Final = 8 * 2**20  # maximum size of several gradients that are reduced together

MOST_UNDER_WAY: Final = 1  # reductions; after starting one more, a server waits for the oldest


@dataclass(frozen=True, slots=True)
class _Sent:
    """A bucket of parameters whose flattened gradients, `flat`, are being reduced to `owner`."""

    names: list[str]
    owner: int
    flat: Tensor
    exchange: Exchange


@dataclass(eq=False)
class GradientSums:
    """Sums the gradients of one backward pass over all servers.

    Every server creates a `GradientSums` with the same parameters, and calls `finish` at the end.

    Args:
        parameters: all trained parameters by name, in the order of the forward pass.
        owners: rank that owns each parameter, by name.

    Attributes:
        waited_s: time in seconds that this server has waited for reductions.
    """

    ranks: Ranks
    parameters: Mapping[str, nn.Parameter]
    owners: Mapping[str, int]
    waited_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._left = list(self.parameters)  # gradients are sent from the end of this list
        self._complete: set[str] = set()
        self._here: set[str] = set()  # parameters with a gradient on this server
        self._collected: dict[tuple[int, torch.dtype], list[str]] = {}
        self._under_way: deque[_Sent] = deque()

    def complete(self, name: str) -> None:
        """Record that a parameter's gradient is complete on this server, and send full buckets."""
        self._complete.add(name)
        while self._left and self._left[-1] in self._complete:
            self._collect(self._left.pop())
        while self._under_way and self._under_way[0].exchange.done():
            self._take(self._under_way.popleft())

    def finish(self) -> list[str]:
        """Send all remaining gradients and wait for all sums.

        Afterwards, each parameter's `grad` is the gradient sum on the server that owns the
        parameter, and None on the other servers.

        Returns:
            The names of the parameters that had a gradient on at least one server.
        """
        while self._left:
            self._collect(self._left.pop())
        for key in sorted(self._collected, key=str):
            self._send(key)
        while self._under_way:
            self._take(self._under_way.popleft())
        here = "".join("01"[name in self._here] for name in self.parameters)
        there = self.ranks.agree(here)
        found = [name for i, name in enumerate(self.parameters) if any(t[i] == "1" for t in there)]
        for name in self.parameters.keys() - found:
            self.parameters[name].grad = None
        return found

    def _collect(self, name: str) -> None:
        """Add a gradient to the bucket for its owner and dtype, and send the bucket if full."""
        parameter = self.parameters[name]
        if parameter.grad is not None:
            self._here.add(name)
        key = self.owners[name], parameter.dtype
        names = self._collected.setdefault(key, [])
        held_bytes = sum(self.parameters[other].nbytes for other in names)
        if names and held_bytes + parameter.nbytes > BUCKET_BYTES:
            self._send(key)
            names = self._collected[key] = []
        names.append(name)
        if parameter.nbytes >= BUCKET_BYTES:
            self._send(key)

    def _send(self, key: tuple[int, torch.dtype]) -> None:
        names = self._collected.pop(key)
        gradients = []
        for name in names:
            parameter = self.parameters[name]
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients.append(gradient.detach().reshape(-1))
            parameter.grad = None
        flat = gradients[0] if len(gradients) == 1 else torch.cat(gradients)
        self._under_way.append(_Sent(names, key[0], flat, self.ranks.sum_at(key[0], flat)))
        while len(self._under_way) > MOST_UNDER_WAY:
            self._take(self._under_way.popleft())

    def _take(self, sent: _Sent) -> None:
        """Wait for a bucket's reduction; on the owner, store the sums as the parameters' `grad`."""
        began_s = time.perf_counter()
        sent.exchange.wait()
        self.waited_s += time.perf_counter() - began_s
        if sent.owner != self.ranks.rank:
            return
        parameters = [self.parameters[name] for name in sent.names]
        sums = torch.split(sent.flat, [parameter.numel() for parameter in parameters])
        for parameter, gradient in zip(parameters, sums, strict=True):
            parameter.grad = gradient.view_as(parameter)
