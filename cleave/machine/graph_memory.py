"""Compute the working memory of a graph run in advance (docs/protocol.md, *Working memory*).

A small model may create large arrays. All models must have passed `check_graph`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from typing import Final

from cleave.machine import onnx_graph as onnx
from cleave.machine.graph_arrays import (
    FLOAT32,
    FOLLOWED,
    INT64,
    ITEM_BYTES,
    LARGEST_NUMBER,
    LARGEST_RANK,
    MOST_VALUES,
    Attribute,
    Operation,
    Refusal,
    Sized,
    UnboundedError,
)
from cleave.machine.graph_operations import Given, Made, followed, made_by
from cleave.machine.graph_session import GraphError

OPSETS: Final = range(18, 24)  # supported versions of the ONNX operator set

# operations whose output shares the memory of the input
_VIEWS: Final = ("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze")


@dataclass(frozen=True, slots=True)
class GivenInput:
    """The array that a run passes to a graph input.

    Attributes:
        elements: number of elements; None for an array of zeros in the input's fixed shape.
        narrow: whether the elements are 16-bit floating-point numbers, which the run upcasts.
    """

    elements: int | None
    narrow: bool = False


@dataclass(slots=True)
class _Graph:
    """A parsed graph or subgraph. In an input's shape, a string names a dynamic dimension."""

    inputs: dict[str, tuple[int, list[int | str]]] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    constants: dict[str, Sized] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)


class GraphMemory:
    """Computes the working memory of the runs of one serialized ONNX model.

    Raises:
        UnboundedError: if the model has an unsupported operator set or element type.
        GraphError: if the bytes are not a model.
    """

    def __init__(self, model: bytes | memoryview) -> None:
        try:
            self._graph = _read(memoryview(model))
        except onnx.ProtobufError as error:
            raise GraphError(f"it is not an ONNX model: {error}") from None
        self._inputs = [name for name in self._graph.inputs if name not in self._graph.constants]
        self._found: dict[tuple[object, ...], int] = {}

    def peak_bytes(self, given: Sequence[GivenInput], kept: Sequence[bool]) -> int:
        """Return a run's working memory in bytes, excluding the run's inputs and stored outputs.

        Args:
            given: the array for each graph input, in order, excluding constants.
            kept: whether each output is stored on the device, in order.

        Raises:
            UnboundedError: if the working memory cannot be computed before the run, or the inputs
                are incompatible with the graph.
        """
        key = (*given, *kept)
        if key not in self._found:
            if len(self._found) >= _MOST_KEPT:
                self._found.clear()
            try:
                self._found[key] = self._peak(given, kept)
            except onnx.ProtobufError as error:  # subgraphs are parsed only here
                raise GraphError(f"it is not an ONNX model: {error}") from None
        return self._found[key]

    def _peak(self, given: Sequence[GivenInput], kept: Sequence[bool]) -> int:
        graph = self._graph
        if len(given) != len(self._inputs) or len(kept) != len(graph.outputs):
            raise UnboundedError(
                Refusal.SHAPE,
                f"the graph has {len(self._inputs)} inputs and {len(graph.outputs)} outputs, not "
                f"{len(given)} and {len(kept)}",
            )
        inputs = dict(zip(self._inputs, given, strict=True))
        sized = {name: _sized(name, *graph.inputs[name], of) for name, of in inputs.items()}
        found = _Pass(graph, sized, {})
        narrow = {name for name, of in inputs.items() if of.narrow}
        whole = {n for n in narrow if _open(graph.inputs[n][1]) or n in found.enclosed}
        wanted = {name for name, keeps in zip(graph.outputs, kept, strict=True) if keeps}
        zeros = {
            name
            for name, of in inputs.items()
            if of.elements is None and not found.is_added_to(name, wanted)
        }
        held = sum(sized[name].nbytes for name in (*whole, *zeros))
        widened = {name: sized[name].nbytes for name in narrow - whole}
        return held + found.peak_bytes(wanted, widened)


_MOST_KEPT: Final = 16  # cached results; a step's micro-batches have at most two sizes
_MOST_INTEGERS: Final = 4096  # maximum length of an integer list attribute


class _Pass:
    """Computes the sizes of all arrays in a graph, in one pass from the inputs' shapes."""

    def __init__(
        self, graph: _Graph, inputs: Mapping[str, Sized], outer: Mapping[str, Sized]
    ) -> None:
        self.known: dict[str, Sized] = {**outer, **graph.constants, **inputs}
        self.enclosed: set[str] = set()
        self.outputs = graph.outputs
        self._graph = graph
        self._free = {*graph.constants, *inputs}  # names of the arrays that exist before the run
        self._taken: list[set[str]] = []  # names of each operation's inputs
        self._maker: dict[str, int] = {}
        self._working: list[int] = []
        for number, operation in enumerate(graph.operations):
            taken = {name for name in operation.inputs if name}
            inner = _enclosed(operation)
            self.enclosed |= inner
            made = self._made(operation)
            if len(operation.outputs) > len(made.outputs):
                raise operation.refused(f"it has {len(operation.outputs)} outputs")
            for name, sized in zip(operation.outputs, made.outputs, strict=False):
                if name:
                    if name in self._maker or name in self._free:
                        raise UnboundedError(
                            Refusal.NAME, f"the array {name[:60]} is computed twice"
                        )
                    self._maker[name] = number
                    self.known[name] = sized
            self._taken.append(taken | inner)
            self._working.append(made.working_bytes)
        for name in graph.outputs:
            if name not in self._maker and name not in self.known:
                raise UnboundedError(Refusal.NAME, f"no operation computes the output {name[:60]}")

    def _made(self, operation: Operation) -> Made:
        given: Given = [self._of(name) if name else None for name in operation.inputs]
        if operation.name in ("Constant", "ConstantOfShape"):
            return Made([_constant(operation, given)])
        if operation.name == "If":
            return self._branches(operation)
        if operation.name == "Scan":
            return self._scan(operation, given)
        return made_by(operation, given)

    def _of(self, name: str) -> Sized:
        found = self.known.get(name)
        if found is None:
            raise UnboundedError(
                Refusal.NAME, f"the array {name[:60]} is used before it is computed"
            )
        return found

    def _inside(self, operation: Operation, name: str, inputs: Sequence[Sized]) -> _Pass:
        """Compute the sizes of the arrays in the subgraph `name` of an operation."""
        attribute = operation.attributes.get(name)
        if attribute is None:
            raise operation.refused(f"it has no graph {name}")
        graph = _graph_of(attribute.graph)
        if len(inputs) != len(graph.inputs):
            raise operation.refused(f"its graph has {len(graph.inputs)} inputs")
        return _Pass(graph, dict(zip(graph.inputs, inputs, strict=True)), self.known)

    def _branches(self, operation: Operation) -> Made:
        yes, no = (self._inside(operation, n, ()) for n in ("then_branch", "else_branch"))
        outputs = [[inside.known[name] for name in inside.outputs] for inside in (yes, no)]
        shapes = [[(one.shape, one.type) for one in each] for each in outputs]
        if shapes[0] != shapes[1]:
            raise operation.refused("its branches do not make the same shapes")
        made = [Sized(*one) for one in shapes[0]]
        return Made(made, max(inside.peak_bytes(set(), {}) for inside in (yes, no)))

    def _scan(self, operation: Operation, given: Given) -> Made:
        body = operation.attributes.get("body")
        rows = operation.integer("num_scan_inputs", 0)
        arrays = [one for one in given if one is not None]
        states = len(arrays) - rows
        if body is None or rows < 1 or states < 0 or len(arrays) < len(given):
            raise operation.refused("its inputs do not fit its graph")
        outputs = len(operation.outputs) - states
        for name, count in (("scan_input_axes", rows), ("scan_output_axes", outputs)):
            axes = operation.integers(name)
            if axes is not None and (len(axes) != count or any(axes)):
                raise operation.refused("it goes along another axis than the first")
        scanned = arrays[states:]
        if any(not one.shape for one in scanned) or len({one.shape[0] for one in scanned}) != 1:
            raise operation.refused("the arrays that it goes along have not as many rows")
        times = scanned[0].shape[0]
        held = [Sized(one.shape, one.type) for one in arrays[:states]]
        inside = self._inside(
            operation, "body", [*held, *(Sized(one.shape[1:], one.type) for one in scanned)]
        )
        found = [inside.known[name] for name in inside.outputs]
        if len(found) != len(operation.outputs):
            raise operation.refused(f"its graph has {len(found)} outputs")
        if [(one.shape, one.type) for one in found[:states]] != [(o.shape, o.type) for o in held]:
            raise operation.refused("its state changes its shape")
        rest = [Sized((times, *one.shape), one.type) for one in found[states:]]
        turning = sum(one.nbytes for one in held)
        return Made([*held, *rest], inside.peak_bytes(set(), {}) + turning)

    def is_added_to(self, name: str, wanted: Set[str]) -> bool:
        """Return True if an input's only use is an addition with a stored result of equal shape."""
        takers = [number for number, taken in enumerate(self._taken) if name in taken]
        if len(takers) != 1 or name in self.outputs:
            return False
        operation = self._graph.operations[takers[0]]
        return (
            operation.name == "Add"
            and operation.inputs.count(name) == 1
            and operation.outputs[0] in wanted
            and self.known[operation.outputs[0]].shape == self.known[name].shape
        )

    def peak_bytes(self, kept: Set[str], widened: Mapping[str, int]) -> int:
        """Return the peak total size in bytes of the arrays that are in memory at the same time.

        The result is the larger of two values: the peak in the model's order of operations, and 2/3
        of the peak if each operation runs as late as possible. ONNX Runtime uses the second order,
        but fuses operations. Outputs in `kept` are not counted. `widened` maps each upcast input
        to the size of its fp32 copy in bytes.
        """
        memory = self._memory(kept)
        as_written = self._most(range(len(self._taken)), memory, kept, widened)
        late = self._most(self._late(), memory, kept, widened)
        return max(as_written, late * 2 // 3)

    def _most(
        self,
        order: Iterable[int],
        memory: Mapping[str, str],
        kept: Set[str],
        widened: Mapping[str, int],
    ) -> int:
        """Return the peak total size in bytes if the operations run in the order `order`."""
        owners = [{memory[name] for name in taken if name in memory} for taken in self._taken]
        uses = Counter(owner for each in owners for owner in each)
        uses.update(memory.get(name, "") for name in set(self.outputs))  # in memory until the end
        live = peak = 0
        for number in order:
            made = [name for name in self._graph.operations[number].outputs if name]
            made = [name for name in made if memory[name] == name and name not in kept]
            live += sum(self.known[name].nbytes for name in made)
            wide = sum(widened.get(name, 0) for name in self._taken[number])
            peak = max(peak, live + self._working[number] + wide)
            uses.subtract(owners[number])
            ended = {*owners[number], *made} - kept
            live -= sum(self.known[name].nbytes for name in ended if name and not uses[name])
        return peak

    def _memory(self, kept: Set[str]) -> dict[str, str]:
        """Map the name of each computed array to the name of the array whose memory it uses.

        The name is empty for views of inputs and constants. It is also empty for a matrix product
        that is only added to an input, because the product is written to the sum's memory.
        """
        found: dict[str, str] = {}
        ends = {*self.outputs, *self.enclosed}
        turned = self._turned(ends)
        takers = Counter(name for taken in self._taken for name in taken)
        for operation in self._graph.operations:
            output = operation.outputs[0] if operation.outputs else ""
            viewed = operation.name in _VIEWS and output not in ends
            if viewed or output in turned:
                found[output] = found.get(operation.inputs[0], "")
                continue
            if operation.name == "Add" and output in kept:
                shape = self.known[output].shape
                others = [name for name in operation.inputs if name not in self._free]
                for name in others if len(others) == 1 else ():
                    maker = self._graph.operations[self._maker[name]] if name in found else None
                    if (
                        maker is not None
                        and maker.name == "MatMul"
                        and len(shape) == 2
                        and self.known[name].shape == shape
                        and takers[name] == 1
                        and name not in ends
                    ):
                        found[name] = ""
            found.update((name, name) for name in operation.outputs if name)
        return found

    def _turned(self, ends: Set[str]) -> set[str]:
        """Return the names of transposed arrays that are not copied.

        Only matrix products use these arrays.
        """
        found: set[str] = set()
        others = set(ends)  # arrays that are used other than in matrix multiplications
        for operation in reversed(self._graph.operations):
            if operation.name == "Transpose" and others.isdisjoint(operation.outputs[:1]):
                turned = self.known[operation.outputs[0]]
                rank = len(turned.shape)
                order = operation.integers("perm") or range(rank)[::-1]
                swaps = [*range(rank - 2), rank - 1, rank - 2]
                if rank > 1 and turned.type == FLOAT32 and list(order) == swaps:
                    found.update(operation.outputs)
                    continue
            if operation.name != "MatMul":
                others.update(operation.inputs)
        return found

    def _late(self) -> Iterator[int]:
        """Yield the operations' indices in an order that runs each operation as late as possible.

        The order is the postorder of a depth-first traversal from the operations whose outputs no
        operation uses. The traversal visits operations that are later in the model first.
        """
        needs = [
            sorted({self._maker[name] for name in taken if name in self._maker})
            for taken in self._taken
        ]
        needed = {number for each in needs for number in each}
        todo = [(number, False) for number in range(len(needs)) if number not in needed]
        seen: set[int] = set()
        while todo:
            number, done = todo.pop()
            if done:
                yield number
            elif number not in seen:
                seen.add(number)
                todo.append((number, True))
                todo.extend((other, False) for other in needs[number] if other not in seen)


def _constant(operation: Operation, given: Given) -> Sized:
    value = operation.attributes.get("value")
    if operation.name == "Constant":
        if value is not None:
            return _tensor(value.tensor)
        if "value_int" in operation.attributes:
            return Sized((), INT64, (operation.integer("value_int", 0),))
        found = operation.integers("value_ints")
        if found is not None:
            return followed((len(found),), INT64, found)
        if "value_float" in operation.attributes:
            return Sized((), FLOAT32)
        raise operation.refused("it has no value")
    shape = given[0].values if given and given[0] is not None else None
    if shape is None:
        raise operation.refused("its shape is not known before the run")
    filled = _tensor(value.tensor) if value is not None else Sized((1,), FLOAT32)
    made = Sized(shape, filled.type)
    if filled.values and len(filled.values) == 1 and made.elements <= MOST_VALUES:
        return followed(shape, filled.type, filled.values * made.elements)
    return made


def _enclosed(operation: Operation) -> set[str]:
    """Return the names of the outer graph's arrays that the subgraphs of an operation use."""
    found: set[str] = set()
    for attribute in operation.attributes.values():
        if attribute.graph:
            graph = _graph_of(attribute.graph)
            own = {*graph.inputs, *graph.constants}
            for inner in graph.operations:
                found |= {*inner.inputs, *_enclosed(inner)} - own
                own.update(inner.outputs)
            found |= {*graph.outputs} - own
    return found - {""}


def _open(sizes: Sequence[int | str]) -> int:
    """Return the number of dynamic dimensions in a shape."""
    return sum(isinstance(size, str) for size in sizes)


def _sized(name: str, type: int, sizes: Sequence[int | str], given: GivenInput) -> Sized:
    """Return an input's `Sized`, with the dynamic dimension computed from the element count."""
    shown, free = f"the input {name[:60]}", _open(sizes)
    if given.elements is None:
        if free:
            raise UnboundedError(
                Refusal.SHAPE, f"{shown} cannot be zeros: its shape is {list(sizes)}"
            )
        return Sized(tuple(size for size in sizes if isinstance(size, int)), type)
    fixed = prod(size for size in sizes if isinstance(size, int))
    batch = given.elements // fixed if free and fixed > 0 else 1
    if free > 1 or fixed < 0 or batch * fixed != given.elements:
        raise UnboundedError(
            Refusal.SHAPE,
            f"{shown} has the shape {list(sizes)}, but {given.elements} elements arrived",
        )
    return Sized(tuple(size if isinstance(size, int) else batch for size in sizes), type)


# --- reading ----------------------------------------------------------------------------------


def _read(model: memoryview) -> _Graph:
    versions = {
        _last(value, onnx.OpsetField.VERSION)
        for number, value in onnx.fields(model)
        if number == onnx.ModelField.OPSET
    }
    if len(versions) != 1 or not versions <= set(OPSETS):
        raise UnboundedError(
            Refusal.OPSET,
            f"a graph must use one of the ONNX operator sets {OPSETS[0]} to {OPSETS[-1]}, but "
            f"this one uses {', '.join(map(str, sorted(versions))) or 'none'}",
        )
    return _graph_of(_joined(model, onnx.ModelField.GRAPH), inside=False)


def _graph_of(message: bytes, *, inside: bool = True) -> _Graph:
    """Parse a serialized graph. The types of a subgraph's inputs are determined later."""
    graph = _Graph()
    for number, value in onnx.parts(memoryview(message)):
        match number:
            case onnx.GraphField.NODE:
                graph.operations.append(_operation(value))
            case onnx.GraphField.CONSTANT:
                graph.constants[onnx.name_in(value, onnx.TensorField.NAME)] = _tensor(value)
            case onnx.GraphField.INPUT:
                name = onnx.name_in(value, onnx.ValueField.NAME)
                if name in graph.inputs:
                    raise UnboundedError(Refusal.NAME, f"the input {name[:60]} occurs twice")
                graph.inputs[name] = (0, []) if inside else _input(value)
            case onnx.GraphField.OUTPUT:
                graph.outputs.append(onnx.name_in(value, onnx.ValueField.NAME))
    return graph


def _operation(message: memoryview) -> Operation:
    operation = Operation()
    for number, value in onnx.parts(message):
        match number:
            case onnx.NodeField.INPUT:
                operation.inputs.append(onnx.text(value))
            case onnx.NodeField.OUTPUT:
                operation.outputs.append(onnx.text(value))
            case onnx.NodeField.OPERATION:
                operation.name = onnx.text(value)
            case onnx.NodeField.ATTRIBUTE:
                name = onnx.name_in(value, onnx.AttributeField.NAME)
                if name in operation.attributes:
                    raise UnboundedError(
                        Refusal.NAME, f"{operation.name}: the attribute {name[:60]} occurs twice"
                    )
                operation.attributes[name] = _attribute(value)
    return operation


def _attribute(message: memoryview) -> Attribute:
    found = Attribute()
    for number, value in onnx.fields(message):
        match number, value:
            case onnx.AttributeField.INTEGER, int():
                found.integer = _signed(value)
            case onnx.AttributeField.INTEGERS, _:
                found.integers += map(_signed, islice(onnx.integers(value), _MOST_INTEGERS))
                if len(found.integers) >= _MOST_INTEGERS:
                    raise UnboundedError(Refusal.SHAPE, "an attribute has too many integers")
            case onnx.AttributeField.TEXT, memoryview():
                found.text = onnx.text(value)
    found.tensor = _joined(message, onnx.AttributeField.TENSOR)
    found.graph = _joined(message, onnx.AttributeField.GRAPH)
    return found


def _tensor(message: bytes | memoryview) -> Sized:
    sizes: list[int] = []
    values: list[int] = []
    type, raw, most = 0, memoryview(b""), MOST_VALUES
    for number, value in onnx.fields(memoryview(message)):
        match number, value:
            case onnx.TensorField.SIZE, _ if len(sizes) <= LARGEST_RANK:
                sizes += map(_signed, islice(onnx.integers(value), LARGEST_RANK + 1))
            case onnx.TensorField.TYPE, int():
                type = value
            case ((onnx.TensorField.INT32 | onnx.TensorField.INT64), _) if len(values) <= most:
                values += map(_signed, islice(onnx.integers(value), most + 1))
            case onnx.TensorField.BYTES, memoryview():
                raw = value
    found = Sized(tuple(sizes), type)
    if len(sizes) > 1 or type not in FOLLOWED or found.elements > most:
        return found
    if len(raw):
        each = ITEM_BYTES[type]
        values = [
            _within(int.from_bytes(raw[at : at + each], "little", signed=True))
            for at in range(0, len(raw), each)
        ]
    return Sized(found.shape, type, tuple(values) if len(values) == found.elements else None)


def _input(message: memoryview) -> tuple[int, list[int | str]]:
    """Return the element type and shape of a graph input, with names for dynamic dimensions."""
    kind = _joined(memoryview(_joined(message, onnx.ValueField.TYPE)), onnx.TypeField.TENSOR)
    sizes: list[int | str] = []
    shapes = 0
    type = 0
    for number, value in onnx.fields(memoryview(kind)):
        if number == onnx.TensorTypeField.ELEMENT and isinstance(value, int):
            type = value
        elif number == onnx.TensorTypeField.SHAPE and not isinstance(value, int):
            shapes += 1
            for part, size in onnx.parts(value):
                if part == onnx.ShapeField.SIZE and len(sizes) <= LARGEST_RANK:
                    sizes.append(_number(size))
    if not shapes:
        raise UnboundedError(Refusal.SHAPE, "an input has no shape")
    return type, sizes


def _number(size: memoryview) -> int | str:
    """Return the size of a fixed dimension, or the name of a dynamic dimension."""
    found: int | str = ""
    for number, value in onnx.fields(size):
        if number == onnx.SizeField.NUMBER and isinstance(value, int):
            found = _signed(value)
        elif number == onnx.SizeField.NAME and isinstance(value, memoryview):
            found = onnx.text(value)
    return found


def _last(message: int | memoryview, number: int) -> int:
    found = 0
    if not isinstance(message, int):
        for part, value in onnx.fields(message):
            if part == number and isinstance(value, int):
                found = value
    return found


def _joined(message: memoryview, number: int) -> bytes:
    """Return the message in the field `number`, merged from all occurrences of the field."""
    return b"".join(value for part, value in onnx.parts(message) if part == number)


def _signed(value: int) -> int:
    return _within(value - 2**64 if value >= 2**63 else value)


def _within(value: int) -> int:
    """Clamp an integer to the range from -LARGEST_NUMBER to LARGEST_NUMBER."""
    return max(-LARGEST_NUMBER, min(value, LARGEST_NUMBER))
