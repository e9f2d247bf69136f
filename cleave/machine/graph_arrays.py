"""Arrays and operations of a graph, as far as the sizes of what it computes follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import Final, TypeAlias

from cleave.machine.graph_session import GraphError

Shape: TypeAlias = tuple[int, ...]

LARGEST_NUMBER: Final = 2**53
"""Numbers from here on are not told apart: JavaScript has no larger whole numbers."""

LARGEST_RANK: Final = 32
MOST_VALUES: Final = 64
"""Arrays of more elements are never followed by value."""

FLOAT32, UINT8, INT32, INT64, BOOL = 1, 2, 6, 7, 9  # ONNX's numbers of types
ITEM_BYTES: Final[Mapping[int, int]] = {FLOAT32: 4, UINT8: 1, INT32: 4, INT64: 8, BOOL: 1}
"""Bytes of an element by ONNX's number of its type; graphs have no others."""

FOLLOWED: Final = (INT32, INT64, BOOL)
"""Types of arrays that are followed by value."""


class Refusal(StrEnum):
    """Why the memory of a run is not known before it."""

    OPSET = "opset"
    OPERATION = "operation"
    TYPE = "type"
    NAME = "name"
    SHAPE = "shape"
    SIZE = "size"


class UnboundedError(GraphError):
    """The memory of a run is not known before it.

    Attributes:
        refusal: why.
    """

    def __init__(self, refusal: Refusal, text: str) -> None:
        super().__init__(text)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class Sized:
    """What is known of an array before a run.

    Attributes:
        shape: its sizes.
        type: ONNX's number of the type of its elements.
        values: its elements, of an array of integers or truth values with at most one dimension;
            None where they are not known.
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
        """Return how many elements it has."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return its size."""
        return self.elements * ITEM_BYTES[self.type]


@dataclass(slots=True)
class Attribute:
    """An attribute of an operation.

    Attributes:
        integer, integers, text: its value, where it is one of these.
        tensor, graph: its value's bytes, where it is one of these.
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
        name: of ONNX's default domain.
        inputs, outputs: names of arrays; empty where an optional one is left out.
        attributes: by name.
    """

    name: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    attributes: dict[str, Attribute] = field(default_factory=dict)

    def integer(self, name: str, default: int) -> int:
        """Return an attribute that is an integer."""
        found = self.attributes.get(name)
        return default if found is None else found.integer

    def integers(self, name: str) -> Sequence[int] | None:
        """Return an attribute that is a list of integers."""
        found = self.attributes.get(name)
        return None if found is None else found.integers

    def refused(self, what: str) -> UnboundedError:
        """Return the error for something that makes the size of what it computes unknown."""
        return UnboundedError(Refusal.SHAPE, f"{self.name[:60]}: {what[:400]}")
