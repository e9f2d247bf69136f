"""Collective operations of the servers that train one model together, as data-parallel ranks.

Every rank draws the same batches and computes some of the sequences with its own fleet. Gradients
are summed over all ranks. Each rank stores the optimizer state of the parameters that it owns, and
updates these parameters (ZeRO, arXiv 1910.02054). All ranks call the same operations in the same
order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from cleave.errors import CleaveError

BUCKET_BYTES: Final = 32 * 2**20  # maximum size of several tensors that are broadcast together

# Timeout of a collective operation. A step may take hours; torch reports a dead rank at once.
WAIT_S: Final = 7 * 24 * 3600

_END: Final = -1


class LostServerError(CleaveError):
    """Raised when the connection to another server that trains the same model is lost."""


@dataclass(frozen=True, slots=True)
class Collected:
    """Tensors of all ranks, which rank 0 can read within the context of `Ranks.collect`.

    Attributes:
        tensors: all ranks' tensors by name. Other ranks' tensors are on `meta`, without values.
        fetch: returns a CPU copy of the named tensor of another rank; None with a single rank.
    """

    tensors: Mapping[str, Tensor]
    fetch: Callable[[str], Tensor] | None = None


class Exchange(Protocol):
    """A collective operation that runs asynchronously."""

    def done(self) -> bool:
        """Return True once the operation is complete or has failed."""

    def wait(self) -> None:
        """Wait until the operation is complete; raise LostServerError if another rank is lost."""


class Ranks(Protocol):
    """Collective operations over all ranks. Every rank calls the same methods in the same order.

    Attributes:
        rank: index of this rank, from 0. Rank 0 writes the run folder.
    """

    rank: int
    count: int

    def agree(self, value: Any) -> list[Any]:
        """Gather a JSON-serializable value from every rank and return all values in rank order."""

    def sum_at(self, owner: int, tensor: Tensor) -> Exchange:
        """Start an asynchronous sum of a tensor over all ranks, into the tensor on rank `owner`.

        All ranks pass tensors of the same shape and dtype, and must not use them before the sum is
        complete. Afterwards, the tensors on all ranks except the owner have undefined values.
        """

    def spread(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Overwrite each tensor on all ranks with the values of the rank that owns the tensor."""

    def collect(self, tensors: Mapping[str, Tensor]) -> AbstractContextManager[Collected | None]:
        """Return a context manager that yields all ranks' tensors on rank 0, and None elsewhere.

        Other ranks send requested tensors until rank 0 leaves its context. Each tensor name must
        be unique across the ranks.
        """


class _Finished:
    """Collective operation of a single rank, which is complete from the start."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Do nothing, because the operation is complete."""


@dataclass(frozen=True, slots=True)
class _PendingReduce:
    """An asynchronous reduction in torch's process group."""

    work: dist.Work

    def done(self) -> bool:
        return self.work.is_completed()

    def wait(self) -> None:
        with _noticing_loss():
            self.work.wait()


class Alone:
    """Implementation of `Ranks` for a single server, without communication."""

    rank = 0
    count = 1

    def agree(self, value: Any) -> list[Any]:
        return [value]

    def sum_at(self, owner: int, tensor: Tensor) -> Exchange:
        return _Finished()

    def spread(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Do nothing, because a single rank already has all values."""

    def collect(self, tensors: Mapping[str, Tensor]) -> AbstractContextManager[Collected | None]:
        return nullcontext(Collected(tensors))


class TorchRanks:
    """Implementation of `Ranks` with `torch.distributed`, which must be initialized first."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.count = dist.get_world_size()

    def agree(self, value: Any) -> list[Any]:
        """Implement `Ranks.agree` by gathering JSON strings as tensors of equal length."""
        said = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        with _noticing_loss():
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
            dist.all_gather(sizes, torch.tensor([len(said)]))
            longest = int(max(sizes))
            texts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(said)] = said
            dist.all_gather(texts, padded)
        pairs = zip(texts, sizes, strict=True)
        return [json.loads(bytes(text[: int(size)].tolist())) for text, size in pairs]

    def sum_at(self, owner: int, tensor: Tensor) -> Exchange:
        with _noticing_loss():
            return _PendingReduce(dist.reduce(tensor, owner, async_op=True))

    def spread(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Implement `Ranks.spread`. Tensors with the same owner are broadcast in buckets."""
        for owner, bucket in _buckets(tensors, owners):
            with _noticing_loss(), _flat(bucket, unpack=owner != self.rank) as flat:
                dist.broadcast(flat, owner)

    @contextmanager
    def collect(self, tensors: Mapping[str, Tensor]) -> Iterator[Collected | None]:
        """Implement `Ranks.collect`. Rank 0 fetches one tensor at a time, to save memory."""
        names = [
            (n, list(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()
        ]
        everyone = [(rank, *each) for rank, those in enumerate(self.agree(names)) for each in those]
        if self.rank:
            self._answer(tensors, [name for _, name, *_ in everyone])
            yield None
            return
        numbers = {name: number for number, (_, name, *_) in enumerate(everyone)}
        known = dict(tensors)
        for rank, name, shape, dtype in everyone:
            if rank:
                known[name] = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

        def fetch(name: str) -> Tensor:
            wanted = torch.empty_like(known[name], device="cpu")
            with _noticing_loss():
                self._ask(numbers[name])
                dist.recv(wanted, everyone[numbers[name]][0])
            return wanted

        try:
            yield Collected(known, fetch)
        finally:
            with _noticing_loss():
                self._ask(_END)

    def _ask(self, number: int) -> int:
        """Broadcast rank 0's `number` and return it: a requested tensor's index, or `_END`."""
        asked = torch.tensor([number])
        dist.broadcast(asked, 0)
        return int(asked)

    def _answer(self, tensors: Mapping[str, Tensor], names: Sequence[str]) -> None:
        """Send each tensor that rank 0 requests, until rank 0 broadcasts `_END`."""
        with _noticing_loss():
            while (number := self._ask(_END)) != _END:
                if names[number] in tensors:
                    dist.send(tensors[names[number]].detach().contiguous(), 0)


@contextmanager
def _noticing_loss() -> Iterator[None]:
    """Convert a RuntimeError that torch raises within the context to a LostServerError."""
    try:
        yield
    except RuntimeError as error:
        raise LostServerError(
            f"another server of this run was lost ({str(error).splitlines()[0][:200]}); training "
            "continues from the last checkpoint once it has returned"
        ) from error


def _buckets(
    tensors: Sequence[Tensor], owners: Sequence[int]
) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield the owner and the tensors of each bucket. Tensors in a bucket share owner and dtype."""
    pairs = sorted(zip(owners, tensors, strict=True), key=lambda pair: pair[0])
    for (owner, _), group in groupby(pairs, key=lambda pair: (pair[0], pair[1].dtype)):
        bucket: list[Tensor] = []
        held_bytes = 0
        for _, tensor in group:
            if bucket and held_bytes + tensor.nbytes > BUCKET_BYTES:
                yield owner, bucket
                bucket, held_bytes = [], 0
            bucket.append(tensor)
            held_bytes += tensor.nbytes
        yield owner, bucket


@contextmanager
def _flat(tensors: Sequence[Tensor], *, unpack: bool) -> Iterator[Tensor]:
    """Yield one tensor with the values of all `tensors`; if `unpack`, copy it back on exit."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        yield tensors[0].detach()
        return
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    yield flat
    if unpack:
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.detach().copy_(part.view_as(tensor))


def owners_of(sizes: Sequence[int], count: int) -> list[int]:
    """Return the rank that owns each parameter, chosen to balance memory.

    A rank stores a gradient and two optimizer moments of each parameter that it owns. In addition,
    every rank stores the largest parameter's gradient until that gradient is summed. The largest
    parameter is usually the embedding, whose gradient is complete last.
    """
    largest_first = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    gradient = max(sizes, default=0)
    load = [gradient] * count
    owners = [0] * len(sizes)
    for index in largest_first:
        owners[index] = load.index(min(load))
        load[owners[index]] += 3 * sizes[index]
        if index == largest_first[0]:  # the initial load already includes the gradient
            load[owners[index]] -= gradient
    return owners
