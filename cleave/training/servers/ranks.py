"""Collective operations of the servers that train one model together, as data-parallel ranks.

Every rank draws the same batches, and computes some of the sequences with its own fleet. Gradients
are summed over all ranks. Each rank updates the parameters that it owns, and holds their optimizer
state (ZeRO: arXiv 1910.02054). All ranks call the same operations in the same order.
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

BUCKET_BYTES: Final = 32 * 2**20  # of tensors that are broadcast together

# Timeout of a collective operation. A step may take hours; torch reports a dead rank at once.
WAIT_S: Final = 7 * 24 * 3600

_END: Final = -1


class LostServerError(CleaveError):
    """The connection to another server that trains the same model is lost."""


@dataclass(frozen=True, slots=True)
class Collected:
    """Tensors of all ranks, which rank 0 reads within a `Ranks.collect` block.

    Attributes:
        tensors: tensors by name. Tensors of other ranks are on device `meta`, without values.
        fetch: returns another rank's tensor on the CPU, given its name. None with a single rank.
    """

    tensors: Mapping[str, Tensor]
    fetch: Callable[[str], Tensor] | None = None


class Exchange(Protocol):
    """A collective operation that runs asynchronously."""

    def done(self) -> bool:
        """Return True once the operation is complete or has failed."""

    def wait(self) -> None:
        """Wait until the operation is complete; LostServerError means that another rank is lost."""


class Ranks(Protocol):
    """Collective operations over all ranks. Every rank calls the same methods in the same order.

    Attributes:
        rank: index of this rank, from 0. Rank 0 writes the run folder.
        count: number of ranks.
    """

    rank: int
    count: int

    def agree(self, value: Any) -> list[Any]:
        """Return the values of all ranks in rank order. They must be representable in JSON."""

    def sum_at(self, owner: int, tensor: Tensor) -> Exchange:
        """Start to sum a tensor of one shape and dtype over all ranks into the owner's tensor.

        Do not use the tensor until the sum is complete. On other ranks, it is undefined afterwards.
        """

    def spread(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Broadcast each tensor from its owner into the same tensor on all other ranks."""

    def collect(self, tensors: Mapping[str, Tensor]) -> AbstractContextManager[Collected | None]:
        """Return a context manager that yields the tensors of all ranks on rank 0, else None.

        Other ranks send their tensors on request, and wait until rank 0 leaves its block. A name
        must not occur on two ranks.
        """


class _Finished:
    """A collective operation of a single rank, which is complete from the start."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """Return at once."""


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
    """Implements `Ranks` for a single server, without communication."""

    rank = 0
    count = 1

    def agree(self, value: Any) -> list[Any]:
        return [value]

    def sum_at(self, owner: int, tensor: Tensor) -> Exchange:
        return _Finished()

    def spread(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Do nothing: there is no other rank to broadcast to."""

    def collect(self, tensors: Mapping[str, Tensor]) -> AbstractContextManager[Collected | None]:
        return nullcontext(Collected(tensors))


class TorchRanks:
    """Implements `Ranks` with `torch.distributed`, whose process group must be initialized."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.count = dist.get_world_size()

    def agree(self, value: Any) -> list[Any]:
        """Gather one value from each rank as JSON text, and return all values in rank order."""
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
        """Broadcast each tensor from its owner. Tensors of one owner are broadcast in buckets."""
        for owner, bucket in _buckets(tensors, owners):
            with _noticing_loss(), _flat(bucket, unpack=owner != self.rank) as flat:
                dist.broadcast(flat, owner)

    @contextmanager
    def collect(self, tensors: Mapping[str, Tensor]) -> Iterator[Collected | None]:
        """Fetch tensors of other ranks one at a time, to save memory; see `Ranks.collect`."""
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
        """Broadcast the index of the tensor that rank 0 requests, or `_END`, and return it."""
        asked = torch.tensor([number])
        dist.broadcast(asked, 0)
        return int(asked)

    def _answer(self, tensors: Mapping[str, Tensor], names: Sequence[str]) -> None:
        """Send rank 0 the tensors that it requests, until rank 0 broadcasts `_END`."""
        with _noticing_loss():
            while (number := self._ask(_END)) != _END:
                if names[number] in tensors:
                    dist.send(tensors[names[number]].detach().contiguous(), 0)


@contextmanager
def _noticing_loss() -> Iterator[None]:
    """Convert torch's RuntimeError into LostServerError."""
    try:
        yield
    except RuntimeError as error:
        raise LostServerError(
            f"another server of this training is gone ({str(error).splitlines()[0][:200]}); "
            "training continues from the last checkpoint once it is back"
        ) from error


def _buckets(
    tensors: Sequence[Tensor], owners: Sequence[int]
) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield the owner and the tensors of each bucket. A bucket's tensors share owner and dtype."""
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
    """Yield the elements of tensors of one dtype in a row, and copy them back if `unpack`."""
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
    """Assign each parameter, given its number of elements, to a rank with equal memory in mind.

    A rank holds a gradient and two optimizer moments of each parameter that it owns. In addition,
    every rank holds the largest parameter's gradient until that gradient is summed. The largest
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
