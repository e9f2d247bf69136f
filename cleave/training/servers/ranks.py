"""Collective operations of the servers that train one model together, as data-parallel ranks.

Every rank draws the same batches and computes some of their sequences with its own fleet. Gradients
are summed. Each rank holds the optimizer state of the parameters that it owns, and updates them
(ZeRO: arXiv 1910.02054). All ranks call the same operations in the same order; a rank without
gradients takes part with zeros.
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

BUCKET_BYTES: Final = 32 * 2**20
"""Maximum size of the buckets in which smaller tensors of one owner travel together."""

WAIT_S: Final = 7 * 24 * 3600
"""Timeout of an operation in seconds, as a step may take hours. A dead rank is noticed at once."""

_END: Final = -1


class LostServerError(CleaveError):
    """Another server that trains the same model has stopped answering."""


@dataclass(frozen=True, slots=True)
class Collected:
    """Tensors of all ranks, for rank 0 to write.

    Attributes:
        tensors: tensors by name; those of other ranks are on device `meta`, without values.
        fetch: returns the values of another rank's tensor, given its name.
    """

    tensors: Mapping[str, Tensor]
    fetch: Callable[[str], Tensor] | None = None


class Exchange(Protocol):
    """An asynchronous collective operation."""

    def done(self) -> bool:
        """Return whether the operation is complete or has failed."""
        ...

    def wait(self) -> None:
        """Wait until the operation is complete.

        Raises:
            LostServerError: when another rank is gone.
        """
        ...


class Ranks(Protocol):
    """Collective operations. Every rank calls the same methods in the same order.

    Attributes:
        rank: number of this rank, from 0. Rank 0 writes the run folder.
        count: number of ranks.
    """

    rank: int
    count: int

    def agree(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order; values must be representable in JSON."""
        ...

    def sum_at(self, owner: int, tensor: Tensor) -> Exchange:
        """Start to sum a tensor over the ranks, in place on its owner.

        Do not use the tensor until the sum is complete; on other ranks its values are lost.
        """
        ...

    def spread(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Broadcast each tensor from its owner to all ranks, in place."""
        ...

    def collect(self, tensors: Mapping[str, Tensor]) -> AbstractContextManager[Collected | None]:
        """Give rank 0 the tensors of all ranks while its block runs; the others wait.

        Args:
            tensors: tensors of this rank; names are unique over all ranks.

        Returns:
            A context manager that yields the tensors on rank 0, and None on the others.
        """
        ...


class _Finished:
    """An operation of a single rank, complete from the start."""

    def done(self) -> bool:
        """See `Exchange.done`."""
        return True

    def wait(self) -> None:
        """See `Exchange.wait`."""


@dataclass(frozen=True, slots=True)
class _PendingReduce:
    """A reduction in torch's process group."""

    work: dist.Work

    def done(self) -> bool:
        """See `Exchange.done`."""
        return self.work.is_completed()

    def wait(self) -> None:
        """See `Exchange.wait`."""
        with _noticing_loss():
            self.work.wait()


class Alone:
    """Ranks of a single server."""

    rank = 0
    count = 1

    def agree(self, value: Any) -> list[Any]:
        """See `Ranks.agree`."""
        return [value]

    def sum_at(self, owner: int, tensor: Tensor) -> Exchange:
        """See `Ranks.sum_at`."""
        return _Finished()

    def spread(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """See `Ranks.spread`."""

    def collect(self, tensors: Mapping[str, Tensor]) -> AbstractContextManager[Collected | None]:
        """See `Ranks.collect`."""
        return nullcontext(Collected(tensors))


class TorchRanks:
    """The ranks of torch's process group, which must be initialized (`torch.distributed`)."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.count = dist.get_world_size()

    def agree(self, value: Any) -> list[Any]:
        """See `Ranks.agree`."""
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
        """See `Ranks.sum_at`."""
        with _noticing_loss():
            return _PendingReduce(dist.reduce(tensor, owner, async_op=True))

    def spread(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """See `Ranks.spread`."""
        for owner, bucket in _buckets(tensors, owners):
            with _noticing_loss(), _flat(bucket, unpack=owner != self.rank) as flat:
                dist.broadcast(flat, owner)

    @contextmanager
    def collect(self, tensors: Mapping[str, Tensor]) -> Iterator[Collected | None]:
        """See `Ranks.collect`. Rank 0 fetches one tensor at a time, to save memory."""
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
        """Broadcast from rank 0 the number of the tensor that it wants; return the number."""
        asked = torch.tensor([number])
        dist.broadcast(asked, 0)
        return int(asked)

    def _answer(self, tensors: Mapping[str, Tensor], names: Sequence[str]) -> None:
        """Send rank 0 the tensors that it asks for, until it sends `_END`."""
        with _noticing_loss():
            while (number := self._ask(_END)) != _END:
                if names[number] in tensors:
                    dist.send(tensors[names[number]].detach().contiguous(), 0)


@contextmanager
def _noticing_loss() -> Iterator[None]:
    """Return a context manager that turns RuntimeError of torch into LostServerError."""
    try:
        yield
    except RuntimeError as error:
        raise LostServerError(
            f"another server of this training is gone ({str(error).splitlines()[0][:200]}); "
            "training goes on from the last checkpoint once it is back"
        ) from error


def _buckets(
    tensors: Sequence[Tensor], owners: Sequence[int]
) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield buckets of tensors of one owner and dtype, with the owner."""
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
    """Yield the elements of all tensors as one tensor; copy them back afterwards if `unpack`."""
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
    """Return the owning rank of each parameter, so that all ranks need similar memory.

    An owner holds a gradient and two moments. The largest parameter is usually the embedding, whose
    gradient is complete last. All ranks hold this gradient until it is summed.

    Args:
        sizes: number of elements of each parameter.
        count: number of ranks.
    """
    largest_first = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    gradient = max(sizes, default=0)
    load = [gradient] * count
    owners = [0] * len(sizes)
    for index in largest_first:
        owners[index] = load.index(min(load))
        load[owners[index]] += 3 * sizes[index]
        if index == largest_first[0]:  # its gradient is counted from the start
            load[owners[index]] -= gradient
    return owners
