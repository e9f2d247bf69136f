"""Data classes that describe a graph's arrays and operations, for computing array sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import Final, TypeAlias

from cleave.machine.graph_session import GraphError

Shape: TypeAlias = tuple[int, ...]

LARGEST_NUMBER: Final = 2**53  # JavaScript's numbers represent no larger integers exactly

LARGEST_RANK: Final = 32
MOST_VALUES: Final = 64  # maximum elements of an array whose values are tracked

FLOAT32, UINT8, INT32, INT64, BOOL = 1, 2, 6, 7, 9  # ONNX's codes of element types
# Size of an element in bytes, by ONNX's code of the element type.
ITEM_BYTES: Final[Mapping[int, int]] = {FLOAT32: 4, UINT8: 1, INT32: 4, INT64: 8, BOOL: 1}

FOLLOWED: Final = (INT32, INT64, BOOL)  # element types of the arrays whose values are tracked


class Refusal(StrEnum):
    """A reason why the working memory of a graph run cannot be computed in advance."""

    OPSET = "opset"
    OPERATION = "operation"
    TYPE = "type"
    NAME = "name"
    SHAPE = "shape"
    SIZE = "size"


class UnboundedError(GraphError):
    """The working memory of a graph run cannot be computed in advance."""

    def __init__(self, refusal: Refusal, text: str) -> None:
        super().__init__(text)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class Sized:
    """An array's shape, ONNX element type and, if tracked, elements (only for rank 0 or 1)."""

    shape: Shape
    type: int
    values: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.type not in ITEM_BYTES:
            raise UnboundedError(
                Refusal.TYPE, f"graphs do not support arrays of the element type {self.type}"
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
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * ITEM_BYTES[self.type]


@dataclass(slots=True)
class Attribute:
    """An attribute of an operation. The field for the attribute's type contains the value."""

    integer: int = 0
    integers: list[int] = field(default_factory=list)
    text: str = ""
    tensor: bytes = b""
    graph: bytes = b""


@dataclass(slots=True)
class Operation:
    """An operation of a graph, such as `MatMul`. Omitted inputs and outputs have empty names."""

    name: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    attributes: dict[str, Attribute] = field(default_factory=dict)

    def integer(self, name: str, default: int) -> int:
        """Return the value of an integer attribute, or `default` if the attribute is missing."""
        found = self.attributes.get(name)
        return default if found is None else found.integer

    def integers(self, name: str) -> Sequence[int] | None:
        """Return the value of an integer list attribute, or None if the attribute is missing."""
        found = self.attributes.get(name)
        return None if found is None else found.integers

    def refused(self, what: str) -> UnboundedError:
        """Return the error for a result whose shape is unknown. `what` is the reason."""
        return UnboundedError(Refusal.SHAPE, f"{self.name[:60]}: {what[:400]}")
