"""Logged steps in files. A restarted server uses them to rebuild trained state on devices.

A file contains the length of a description, the description in msgpack, the arrays, and a checksum.
A file that is damaged, for example by a power loss, ends the log.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

import msgspec

from cleave.files import mapped
from cleave.scheduler.stages.arrays import StageArray, packed
from cleave.scheduler.stages.outcomes import GradientWanted, InputWanted, OutputReady
from cleave.scheduler.stages.resident import KeptState

Returned: TypeAlias = OutputReady | InputWanted | GradientWanted
_KINDS: Final = (OutputReady, InputWanted, GradientWanted)
_LENGTH: Final = struct.Struct("<Q")
_CHECKSUM: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True, eq=False)
class StoredStep:
    """A completed step, with everything that devices and the PS need to repeat it.

    Attributes:
        rate: learning rate of the step.
        bounds: for each stage, the numbers of its first layer and of the layer after its last.
        x, dy, scalars: what devices need to repeat the step; see `LoggedStep`.
        returned: what devices returned during the passes, in the order in which the PS used it.
        dx: gradients of the first stage's inputs, by micro-batch.
        squares: sum of the squared elements of all gradients on devices.
        kept: the trained state that devices kept after the step.
        losses: losses by micro-batch, if a device computed them; otherwise empty.
    """

    rate: float
    bounds: Sequence[tuple[int, int]]
    x: Sequence[Mapping[int, StageArray]]
    dy: Sequence[Mapping[int, StageArray]]
    scalars: Sequence[StageArray]
    returned: Sequence[Returned]
    dx: Mapping[int, Any]
    squares: float
    kept: Sequence[KeptState] = ()
    losses: Mapping[int, Any] = field(default_factory=dict)

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches."""
        return len(self.losses or self.x[0])

    def pack(self) -> Iterator[memoryview]:
        """Yield the contents of the step's file."""
        arrays = [a for each in (*self.x, *self.dy) for a in each.values()] + [*self.scalars]
        payloads = [a.payload for a in arrays] + [one.payload for one in self.returned]
        payloads += [*self.dx.values(), *self.losses.values()]
        parts = [packed(payload) for payload in payloads]
        described = {
            "rate": self.rate,
            "bounds": self.bounds,
            "squares": self.squares,
            "x": [[*each] for each in self.x],
            "dy": [[*each] for each in self.dy],
            "arrays": [[a.rows, a.columns, a.dtype] for a in arrays],
            "returned": [_described(one) for one in self.returned],
            "dx": [*self.dx],
            "losses": [*self.losses],
            "kept": [
                (one.arrays, one.nbytes, [(*key, *held) for key, held in one.state.items()])
                for one in self.kept
            ],
            "sizes": [part.nbytes for part in parts],
        }
        header, sum32 = msgspec.msgpack.encode(described), 0
        head = _LENGTH.pack(len(header)) + header
        for part in (memoryview(head), *parts):
            sum32 = zlib.crc32(part, sum32)
            yield part
        yield memoryview(_CHECKSUM.pack(sum32))

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the step in a file, which is mapped into memory; None if missing or damaged."""
        try:
            with path.open("rb") as file:
                return cls.unpacked(mapped(file))
        except FileNotFoundError:
            return None

    @classmethod
    def unpacked(cls, held: memoryview) -> Self | None:
        """Decode a step from the contents of a file; return None if the contents are damaged."""
        body, end = held[: -_CHECKSUM.size], held[-_CHECKSUM.size :]
        if len(body) < _LENGTH.size or _CHECKSUM.pack(zlib.crc32(body)) != end:
            return None
        (length,) = _LENGTH.unpack_from(body)
        begin = _LENGTH.size + length
        said = msgspec.msgpack.decode(body[_LENGTH.size : begin])
        payloads = iter(cut(body[begin:], said["sizes"]))
        arrays = iter(
            [
                StageArray(rows, columns, dtype, payload)
                # With `strict`, zip would take one payload too many from the iterator.
                for (rows, columns, dtype), payload in zip(said["arrays"], payloads, strict=False)
            ]
        )
        x, dy = (
            [{batch: next(arrays) for batch in each} for each in said[key]] for key in ("x", "dy")
        )
        scalars = [*arrays]
        returned = [
            _returned(kind, stage, batch, next(payloads)) for kind, stage, batch in said["returned"]
        ]
        return cls(
            rate=said["rate"],
            bounds=[(first, stop) for first, stop in said["bounds"]],
            x=x,
            dy=dy,
            scalars=scalars,
            returned=returned,
            dx={batch: next(payloads) for batch in said["dx"]},
            losses={batch: next(payloads) for batch in said.get("losses", ())},
            squares=said["squares"],
            kept=[
                KeptState(arrays, {(k, n, i): (id, done) for k, n, i, id, done in state}, nbytes)
                for arrays, nbytes, state in said.get("kept", ())
            ],
        )


def _described(one: Returned) -> tuple[int, int, int]:
    stage = 0 if isinstance(one, OutputReady) else one.stage
    return _KINDS.index(type(one)), stage, one.batch


def _returned(kind: int, stage: int, batch: int, payload: memoryview) -> Returned:
    match kind:
        case 0:
            return OutputReady(batch, payload)
        case 1:
            return InputWanted(stage, batch, payload)
        case _:
            return GradientWanted(stage, batch, payload)


def cut(body: memoryview, sizes: Iterable[int]) -> Iterator[memoryview]:
    """Yield consecutive parts of `body` with the given sizes in bytes."""
    first = 0
    for size in sizes:
        yield body[first : first + size]
        first += size
