"""The servers that train one model together, as data-parallel ranks.

Every rank has the whole model and draws the same batches. It does some of a batch's sequences with
its own fleet; gradients are summed, and each rank updates the parameters that it owns, whose
optimizer state it alone has (ZeRO: arXiv 1910.02054). All ranks exchange the same things in the
same order: one that did nothing takes part with zeros.
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
"""Smaller tensors of one owner travel together, in buffers of up to this size."""

WAIT_S: Final = 7 * 24 * 3600
"""A rank waits so long for others, whose steps may take hours; one that died is seen at once."""

_END: Final = -1


class LostServerError(CleaveError):
    """Another server that trains the same model does not answer any more."""


@dataclass(frozen=True, slots=True)
class Collected:
    """Tensors of all ranks, for the first one to write.

    Attributes:
        tensors: by name; those of other ranks are on the device `meta`, without values.
        fetch: returns the values of one of these.
    """

    tensors: Mapping[str, Tensor]
    fetch: Callable[[str], Tensor] | None = None


class Exchange(Protocol):
    """A collective operation that was begun, and may still be under way."""

    def done(self) -> bool:
        """Say whether it is over, or has failed."""
        ...

    def wait(self) -> None:
        """Wait until it is over.

        Raises:
            LostServerError: when another rank is gone.
        """
        ...


class Ranks(Protocol):
    """What several servers do together; every one calls the same methods in the same order.

    Attributes:
        rank: the number of this one, from 0. The first writes the run folder.
        count: how many there are.
    """

    rank: int
    count: int

    def agree(self, value: Any) -> list[Any]:
        """Return what each rank gave, which is anything that JSON can hold."""
        ...

    def sum_at(self, owner: int, tensor: Tensor) -> Exchange:
        """Begin to add up a tensor over the ranks; only its owner has the sum in the end.

        Nobody may touch the tensor meanwhile; on other ranks its values are lost.
        """
        ...

    def spread(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Make each tensor what its owner has."""
        ...

    def collect(self, tensors: Mapping[str, Tensor]) -> AbstractContextManager[Collected | None]:
        """Give the first rank the tensors of all, while its block runs; others wait meanwhile.

        Args:
            tensors: those of this rank, which no other names alike.

        Returns:
            A context, whose value is None for all but the first.
        """
        ...


class _Finished:
    """An exchange with nobody."""

    def done(self) -> bool:
        """See `Exchange.done`."""
        return True

    def wait(self) -> None:
        """See `Exchange.wait`."""


@dataclass(frozen=True, slots=True)
class _PendingReduce:
    """An exchange of torch's process group."""

    work: dist.Work

    def done(self) -> bool:
        """See `Exchange.done`."""
        return self.work.is_completed()

    def wait(self) -> None:
        """See `Exchange.wait`."""
        with _noticing_loss():
            self.work.wait()


class Alone:
    """One server, which exchanges nothing."""

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
    """The ranks of torch's process group, which exists already (`torch.distributed`)."""

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
        """See `Ranks.collect`.

        The first rank asks for one tensor after the other, so that it needs memory for one.
        """
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
        """Tell all ranks which tensor the first one wants; return it."""
        asked = torch.tensor([number])
        dist.broadcast(asked, 0)
        return int(asked)

    def _answer(self, tensors: Mapping[str, Tensor], names: Sequence[str]) -> None:
        """Send the first rank what it asks for, until it has all."""
        with _noticing_loss():
            while (number := self._ask(_END)) != _END:
                if names[number] in tensors:
                    dist.send(tensors[names[number]].detach().contiguous(), 0)


@contextmanager
def _noticing_loss() -> Iterator[None]:
    """Tell by `LostServerError` that another rank is gone."""
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
    """Yield tensors in groups that travel together, with their owner."""
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
    """Yield the elements of tensors in one; put them back afterwards if `unpack`."""
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
    """Return which rank owns each parameter, so that all need about as much memory.

    An owner holds a gradient and two moments. The largest parameter is as a rule the embedding,
    whose gradient comes last: the others hold that as well until it is added up.

    Args:
        sizes: elements of each parameter.
        count: of ranks.
    """
    largest_first = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    gradient = max(sizes, default=0)
    load = [gradient] * count
    owners = [0] * len(sizes)
    for index in largest_first:
        owners[index] = load.index(min(load))
        load[owners[index]] += 3 * sizes[index]
        if index == largest_first[0]:  # its gradient counts already
            load[owners[index]] -= gradient
    return owners
