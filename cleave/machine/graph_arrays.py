"""Arrays and operations of a graph, as needed to compute the sizes of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import Final, TypeAlias

from cleave.machine.graph_session import GraphError

Shape: TypeAlias = tuple[int, ...]

LARGEST_NUMBER: Final = 2**53
"""Numbers of this size or more are not distinguished: JavaScript's integers end here."""

LARGEST_RANK: Final = 32
MOST_VALUES: Final = 64
"""Maximum elements of an array whose values are tracked."""

FLOAT32, UINT8, INT32, INT64, BOOL = 1, 2, 6, 7, 9  # ONNX's numbers of types
ITEM_BYTES: Final[Mapping[int, int]] = {FLOAT32: 4, UINT8: 1, INT32: 4, INT64: 8, BOOL: 1}
"""Bytes of an element by ONNX's number of its type; graphs have no other types."""

FOLLOWED: Final = (INT32, INT64, BOOL)
"""Types of arrays whose values are tracked."""


class Refusal(StrEnum):
    """Why the memory of a run cannot be computed before the run."""

    OPSET = "opset"
    OPERATION = "operation"
    TYPE = "type"
    NAME = "name"
    SHAPE = "shape"
    SIZE = "size"


class UnboundedError(GraphError):
    """The memory of a run cannot be computed before the run.

    Attributes:
        refusal: the reason.
    """

    def __init__(self, refusal: Refusal, text: str) -> None:
        super().__init__(text)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class Sized:
    """What is known about an array before a run.

    Attributes:
        shape: the array's sizes.
        type: ONNX's number of the element type.
        values: the elements of an integer or boolean array with at most one dimension; None if
            they are unknown.
    """

    shape: Shape
    type: int
    values: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.type not in ITEM_BYTES:
            raise UnboundedError(
                Refusal.TYPE, f"graphs have no arrays of the element type {self.type}"
            )
        if len(self.shape) > LARGEST_RANK:
            raise UnboundedError(
                Refusal.SHAPE,
                f"an array has {len(self.shape)} dimensions, more than {LARGEST_RANK}",
            )
        if any(size < 0 for size in self.shape):
            raise UnboundedError(Refusal.SHAPE, f"an array has the shape {list(self.shape)}")
        if prod(max(size, 1) for size in self.shape) >= LARGEST_NUMBER:
            raise UnboundedError(Refusal.SIZE, f"an array has the shape {list(self.shape)}")

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the array's size in bytes."""
        return self.elements * ITEM_BYTES[self.type]


@dataclass(slots=True)
class Attribute:
    """An attribute of an operation. The field of its type holds the value.

    Attributes:
        integer, integers, text: value of the attribute.
        tensor, graph: serialized value of the attribute.
    """

    integer: int = 0
    integers: list[int] = field(default_factory=list)
    text: str = ""
    tensor: bytes = b""
    graph: bytes = b""


@dataclass(slots=True)
class Operation:
    """An operation of a graph.

    Attributes:
        name: name of the operation in ONNX's default domain.
        inputs, outputs: names of arrays; empty for an omitted optional array.
        attributes: attributes by name.
    """

    name: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    attributes: dict[str, Attribute] = field(default_factory=dict)

    def integer(self, name: str, default: int) -> int:
        """Return an integer attribute, or the default if it is missing."""
        found = self.attributes.get(name)
        return default if found is None else found.integer

    def integers(self, name: str) -> Sequence[int] | None:
        """Return an attribute that is a list of integers, or None if it is missing."""
        found = self.attributes.get(name)
        return None if found is None else found.integers

    def refused(self, what: str) -> UnboundedError:
        """Return the error for an operation whose result has an unknown size."""
        return UnboundedError(Refusal.SHAPE, f"{self.name[:60]}: {what[:400]}")
