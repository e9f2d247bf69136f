"""Run graphs in PyTorch, on an accelerator or on the CPU."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from cleave.arrays import Array, DType
from cleave.machine.graph_session import GraphError, additions, inputs_of
from cleave.machine.torch_fusion import enclosed, fused
from cleave.machine.torch_operations import Operation, OperationError, operation

# Operations whose inputs after the first are sizes, which stay on the CPU.
_SIZED: Final = frozenset(
    (
        *("ConstantOfShape", "CumSum", "Expand", "Pad", "Range", "Reshape", "Slice", "Split"),
        *("Squeeze", "Tile", "TopK", "Trilu", "Unsqueeze"),
        *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean"),
        *("ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"),
    )
)
_NARROW: Final = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16}

# Operations whose first two inputs are multiplied with each other, and their number of factors.
_FACTORS: Final = {"Einsum": 2, "Gemm": 2, "MatMul": 2}
# Operations that return elements of their first input, or 0, and therefore never round.
_EXACT: Final = frozenset(
    (
        "Flatten",
        "Identity",
        "Relu",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
    )
)
# Operations whose result may overwrite an input of the same shape.
_OVERWRITING: Final = frozenset(
    (
        *("Add", "Div", "Erf", "Exp", "Mul", "Neg", "Reciprocal", "ReluGradient", "Sigmoid"),
        *("Softmax", "SoftmaxGradient", "Sqrt", "Sub", "Tanh", "Where"),
    )
)
# Operations whose results never share memory with inputs, except inputs that they overwrite.
_NEW: Final = _OVERWRITING | {
    *("Gelu", "LayerNormalization", "LogSoftmax", "MatMul", "Pow", "ReduceMean", "ReduceSum"),
    "Relu",
}
_OUTSIDE: Final = ""  # stands for the memory of all arrays that the operations do not allocate


@dataclass(frozen=True, slots=True)
class _Product:
    """A matrix product that is not computed yet, because it is only added to another matrix."""

    a: Tensor
    b: Tensor

    def added_to(self, total: Tensor, *, in_place: bool) -> Tensor:
        """Return the sum of a matrix and this product, in the matrix's memory if `in_place`."""
        shape = (*self.a.shape[:-1], *self.b.shape[1:])
        narrow = self.a.dtype != total.dtype
        if narrow or self.a.dim() != 2 or self.b.dim() != 2 or total.shape != shape:
            product = (self.a @ self.b).to(total.dtype)
            free = (total, product) if in_place else (product,)
            return torch.add(total, product, out=_fitting(free, (total, product)))
        # An expanded matrix has several elements in the same memory.
        add = total.addmm_ if in_place and total.is_contiguous() else total.addmm
        return add(self.a, self.b)


_Value: TypeAlias = Tensor | _Product | None
_Arrays: TypeAlias = dict[str, _Value]


@dataclass(slots=True)
class _Step:
    """An operation of a graph.

    Attributes:
        run: computes the operation; None for the operations with subgraphs.
        ended: names of the arrays that no later operation uses.
        free: names of the inputs whose memory no later operation uses.
    """

    name: str
    run: Operation | None
    inputs: Sequence[str]
    outputs: Sequence[str]
    attributes: Mapping[str, Any]
    ended: Sequence[str] = ()
    free: frozenset[str] = frozenset()


class TorchSession:
    """A graph that PyTorch runs (see `cleave.machine.graph_session.OpenGraph`).

    Results of `run_into` stay on the processor, as tensors that later runs take as inputs.

    Args:
        model: serialized ONNX model, which passed `check_graph`.
        given: dtype of each graph input, in order; None for inputs that are not floating-point.
            Inputs of fixed shape in a 16-bit dtype are upcast where they are used.
        processor: name of a torch device, such as `cuda:0`, `mps` or `cpu`.
        products: DType.BF16 to round the factors and the results of matrix multiplications to bf16,
            as autocast does. Sums of products, and all other operations, are in fp32.

    Attributes:
        inputs, outputs, narrow, in_place, resident: see `OpenGraph`.

    Raises:
        GraphError: if PyTorch or the `onnx` package is missing, or an operation is not supported.

    Example:
        >>> session = TorchSession(model, processor="cuda")
        >>> y = session.run({"x": x})["y"]
    """

    resident = True

    def __init__(
        self,
        model: bytes,
        given: Sequence[DType | None] = (),
        processor: str = "cpu",
        products: DType | None = None,
    ) -> None:
        try:
            import onnx
        except ImportError as error:
            raise GraphError(f"PyTorch cannot read graphs: {error}") from None
        try:
            graph = onnx.load_from_string(model).graph
            self._processor = torch.device(processor)
            narrow = _NARROW[products] if products else None
            self._program = _Program(graph, self._processor, narrow)
        except OperationError as error:
            raise GraphError(str(error)) from None
        except Exception as error:  # noqa: BLE001 - errors of onnx have no common base class
            raise GraphError(f"PyTorch cannot open the graph: {error}"[:300]) from None
        self.inputs: Mapping[str, Sequence[int | str]] = {
            given.name: tuple(
                size.dim_param or size.dim_value for size in given.type.tensor_type.shape.dim
            )
            for given in graph.input
            if given.name not in self._program.constants
        }
        self.outputs = tuple(output.name for output in graph.output)
        dtypes = dict(zip(self.inputs, given, strict=False))
        self.narrow: Mapping[str, DType] = {
            name: dtype
            for name, dtype in dtypes.items()
            if dtype in _NARROW and all(isinstance(size, int) for size in self.inputs[name])
        }
        self.in_place: Mapping[str, str] = {
            output: name
            for output, name in additions(model).items()
            if all(isinstance(size, int) for size in self.inputs[name])
        }

    def run(
        self, given: Mapping[str, Array], wanted: Sequence[str] | None = None
    ) -> dict[str, Array]:
        """Run the graph; return the `wanted` outputs by name (None: all), or raise GraphError."""
        arrays = {name: self.upload(array) for name, array in inputs_of(self, given).items()}
        found = self.run_into(arrays, {}, wanted)
        return {name: host(_widened(value)) for name, value in found.items()}

    def run_into(
        self,
        given: Mapping[str, Tensor],
        into: Mapping[str, Tensor],
        wanted: Sequence[str] | None = None,
    ) -> dict[str, Tensor]:
        """Run the graph, writing some outputs to the memory of inputs; see `OpenGraph`.

        All arrays are tensors on the processor (see `upload`). Tensors in `given` that a run with
        products in bf16 returned may be in bf16.
        """
        names = self.outputs if wanted is None else wanted
        try:
            with torch.no_grad(), _full_precision(self._processor.type):
                found = self._program.run(dict(given), names, into)
                tensors = self._own(dict(zip(names, found, strict=True)), given, into)
            if self._processor.type != "cpu":
                torch.accelerator.synchronize(self._processor)  # raises the run's errors
        except Exception as error:  # noqa: BLE001 - PyTorch's errors have no common base class
            reason = str(error).strip().partition("\n")[0][:300]
            raise GraphError(f"the graph cannot be run: {reason}") from None
        return tensors

    def _own(
        self, found: Mapping[str, Tensor], given: Mapping[str, Tensor], into: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return outputs on the processor that share no memory with inputs or each other.

        A later run may overwrite outputs, and a view would keep a whole array in memory.
        """
        others = (*given.values(), *self._program.constants.values())
        shared = {value.untyped_storage().data_ptr() for value in others}
        owned = {}
        for name, value in found.items():
            tensor = value.to(self._processor).contiguous()
            storage = tensor.untyped_storage()
            if name not in into and (
                storage.data_ptr() in shared or storage.nbytes() > tensor.nbytes
            ):
                tensor = tensor.clone()
            shared.add(tensor.untyped_storage().data_ptr())
            owned[name] = tensor
        return owned

    def upload(self, array: Array) -> Tensor:
        """Copy an array to the processor; bf16 elements are uint16. The CPU shares its memory."""
        array = np.ascontiguousarray(array)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            if array.dtype == np.uint16:
                return (
                    torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(self._processor)
                )
            return torch.from_numpy(array).to(self._processor)


@contextmanager
def _full_precision(kind: str) -> Iterator[None]:
    """Compute without TF32, 16-bit sums and autocast; afterwards, restore the process's settings.

    Args:
        kind: the type of a torch device.
    """
    with torch.autocast(kind, enabled=False):
        if kind != "cuda":
            yield
            return
        products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
        before = (
            products.allow_tf32,
            products.allow_bf16_reduced_precision_reduction,
            convolutions.allow_tf32,
        )
        products.allow_tf32 = convolutions.allow_tf32 = False
        products.allow_bf16_reduced_precision_reduction = False
        try:
            yield
        finally:
            products.allow_tf32, narrow_sums, convolutions.allow_tf32 = before
            products.allow_bf16_reduced_precision_reduction = narrow_sums


def free_bytes(processor: str) -> float:
    """Return the free memory of a torch device in bytes; infinity if it is the host's memory."""
    match torch.device(processor).type:
        case "cuda":
            return float(torch.cuda.mem_get_info(processor)[0])
        case "xpu":
            return float(torch.xpu.mem_get_info(processor)[0])
        case "mps":
            return float(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return math.inf


def host(value: Tensor) -> Array:
    """Return a tensor as a numpy array, without a copy if the tensor is on the CPU."""
    found: Array = value.cpu().numpy()
    return found


class _Program:
    """The operations of a graph or subgraph, in order.

    Attributes:
        constants: tensors by name. Only floating-point tensors are on the accelerator.
    """

    def __init__(
        self, graph: Any, processor: torch.device, products: torch.dtype | None = None
    ) -> None:
        self._processor = processor
        self._products = products
        self.inputs = [given.name for given in graph.input]
        self.outputs = [output.name for output in graph.output]
        self.constants = {each.name: self._tensor(each) for each in graph.initializer}
        nodes = fused(list(graph.node), self.constants, self.outputs)
        self._steps = [self._step(node) for node in nodes]
        taken = [[*node.input, *enclosed(node)] for node in nodes]
        uses = Counter(name for each in taken for name in each)
        uses.update(self.outputs)
        added = {name for node in nodes if node.op_type == "Add" for name in node.input}
        matmuls = {node.output[0] for node in nodes if node.op_type == "MatMul"}
        self._deferred = {name for name in matmuls & added if uses[name] == 1}
        factors = [n for node in nodes for n in node.input[: _FACTORS.get(node.op_type, 0)]]
        self._repeated = {name for name, count in Counter(factors).items() if count > 1}
        # Arrays of the enclosing graphs, which each iteration of a `Scan` uses.
        self._own = {*self.inputs, *self.constants}
        self._own.update(name for node in nodes for name in node.output)
        self._captured = uses.keys() - self._own
        later = {*self.outputs}
        for step, names in zip(reversed(self._steps), reversed(taken), strict=True):
            step.ended = [name for name in {*names, *step.outputs} - later if name]
            later.update(names)
        self._free_inputs(taken)

    def run(
        self,
        given: Mapping[str, _Value],
        wanted: Sequence[str],
        into: Mapping[str, Tensor],
        factors: dict[str, Tensor] | None = None,
    ) -> list[Tensor]:
        """Run the operations and return the outputs `wanted`.

        Args:
            given: tensors of the graph's inputs and, for a subgraph, of the enclosing graphs.
            factors: for a subgraph, rounded factors of products of the enclosing graphs by name.
        """
        outer = given.keys()
        factors = {} if factors is None else factors
        arrays: _Arrays = {**given, **self.constants}
        for step in self._steps:
            made = self._made(step, arrays, factors, into)
            for name, value in zip(step.outputs, made, strict=False):
                arrays[name] = value
            for name in step.ended:
                if name not in self._captured:
                    factors.pop(name, None)
                if name not in outer:
                    arrays.pop(name, None)
        for name in self._own:  # in another iteration, these names refer to other arrays
            factors.pop(name, None)
        return [_computed(arrays[name]) for name in wanted]

    def _free_inputs(self, taken: Sequence[Sequence[str]]) -> None:
        """Find the inputs that operations may overwrite.

        Args:
            taken: the names that each operation uses, those in its subgraphs included.
        """
        memory: dict[str, set[str]] = {}  # by array: the arrays whose memory it may share
        last_use: dict[str, int] = {}
        for number, (step, names) in enumerate(zip(self._steps, taken, strict=True)):
            shared = {part for name in names for part in memory.get(name, {_OUTSIDE})}
            last_use |= dict.fromkeys(shared, number)
            is_new = step.name in _NEW and not step.attributes.get("noop_with_empty_axes")
            for name in step.outputs:
                # The factors of a deferred product are used after its operation.
                is_own = is_new and name not in self._deferred
                memory[name] = {name} if is_own or not shared else shared
        kept = {part for name in self.outputs for part in memory.get(name, ())}
        last_use |= dict.fromkeys({_OUTSIDE, *kept}, len(self._steps))
        for number, step in enumerate(self._steps):
            if step.name in _OVERWRITING:
                parts = {name: memory.get(name, {_OUTSIDE}) for name in step.inputs}
                step.free = frozenset(
                    name
                    for name, mine in parts.items()
                    if all(last_use[part] == number for part in mine)
                    and all(mine.isdisjoint(parts[other]) for other in parts if other != name)
                )

    def _made(
        self,
        step: _Step,
        arrays: _Arrays,
        factors: dict[str, Tensor],
        into: Mapping[str, Tensor],
    ) -> Iterator[_Value] | Sequence[_Value]:
        if step.run is None:
            return self._enclosing(step, arrays, factors)
        values = [arrays[name] if name else None for name in step.inputs]
        if step.name == "Add":
            return [self._added(step, values, into.get(step.outputs[0]))]
        given = [_computed(value) if value is not None else None for value in values]
        if step.name in _EXACT:  # a 16-bit array is upcast only where it is used
            made = step.run(*given)
            return [made] if isinstance(made, Tensor) else made
        rounded = _FACTORS.get(step.name, 0) if self._products else 0
        given = [
            self._factor(name, value, factors) if at < rounded else _widened(value)
            for at, (name, value) in enumerate(zip(step.inputs, given, strict=True))
        ]
        if step.name not in _SIZED:
            given = self._together(given)
        if step.name == "MatMul" and step.outputs[0] in self._deferred:
            a, b = given
            assert a is not None
            assert b is not None
            return [_Product(a, b)]
        if step.name in _OVERWRITING:
            free = _without_use(step, step.inputs, values, given)
            made = step.run(*given, out=_fitting(free, given))
        else:
            made = step.run(*given)
        return [made] if isinstance(made, Tensor) else made

    def _factor(self, name: str, value: Tensor | None, factors: dict[str, Tensor]) -> Any:
        """Return a factor of a product in the dtype of products; keep it if it is used again."""
        if value is None or not value.is_floating_point():
            return value
        found = factors.get(name)
        if found is None:
            found = value.to(self._processor, self._products)
            if name in self._repeated or name in self._captured:
                factors[name] = found
        return found

    def _added(self, step: _Step, values: Sequence[_Value], total: Tensor | None) -> Tensor:
        """Return the sum of two arrays, in the memory of `total` if that is one of them."""
        product = next((each for each in values if isinstance(each, _Product)), None)
        names, rest = zip(
            *(pair for pair in zip(step.inputs, values, strict=True) if pair[1] is not product),
            strict=True,
        )
        given = self._together([_widened(_computed(each)) for each in rest])
        if total is None or all(each is not total for each in rest):
            free = _without_use(step, names, rest, given)
        else:
            free = [total]
        if product is None:
            made: Tensor = torch.add(*given, out=_fitting(free, given))  # type: ignore[arg-type]
            return made
        (other,) = given
        assert other is not None
        if product.a.device != other.device:
            other = other.to(self._processor)
        return product.added_to(other, in_place=any(each is other for each in free))

    def _enclosing(
        self, step: _Step, arrays: _Arrays, factors: dict[str, Tensor]
    ) -> Sequence[_Value]:
        """Run an operation with subgraphs: `If` or `Scan`."""
        if step.name == "If":
            chosen = bool(_computed(arrays[step.inputs[0]]).item())
            branch: _Program = step.attributes["then_branch" if chosen else "else_branch"]
            return branch.run(arrays, branch.outputs, {}, factors)
        body: _Program = step.attributes["body"]
        given = [_widened(_computed(arrays[name])) for name in step.inputs]
        states = given[: len(given) - step.attributes["num_scan_inputs"]]
        scanned = given[len(states) :]
        if any(step.attributes.get("scan_input_directions") or [0]):
            scanned = [
                each.flip(0) if back else each
                for each, back in zip(
                    scanned, step.attributes["scan_input_directions"], strict=True
                )
            ]
        rows: list[Sequence[Tensor]] = []
        for at in range(len(scanned[0])):
            inputs = dict(zip(body.inputs, [*states, *(each[at] for each in scanned)], strict=True))
            found = body.run({**arrays, **inputs}, body.outputs, {}, factors)
            found = [_widened(each) for each in found]
            states, row = found[: len(states)], found[len(states) :]
            rows.append(row)
        made = [torch.stack(each) for each in zip(*rows, strict=True)]
        back = step.attributes.get("scan_output_directions") or [0] * len(made)
        return [*states, *(m.flip(0) if b else m for m, b in zip(made, back, strict=True))]

    def _together(self, given: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Move all tensors to the accelerator if any of them is there."""
        if all(value is None or value.device.type == "cpu" for value in given):
            return list(given)
        return [None if value is None else value.to(self._processor) for value in given]

    def _step(self, node: Any) -> _Step:
        attributes = {each.name: self._attribute(each) for each in node.attribute}
        if node.op_type == "Split":
            attributes["outputs"] = len(node.output)
        enclosing = node.op_type in ("If", "Scan")
        run = None if enclosing else operation(node.op_type, attributes)
        return _Step(node.op_type, run, list(node.input), list(node.output), attributes)

    def _attribute(self, attribute: Any) -> Any:
        import onnx

        value = onnx.helper.get_attribute_value(attribute)
        if isinstance(value, onnx.GraphProto):
            return _Program(value, self._processor, self._products)
        if isinstance(value, onnx.TensorProto):
            return self._tensor(value)
        return value

    def _tensor(self, proto: Any) -> Tensor:
        import onnx

        found = torch.from_numpy(np.array(onnx.numpy_helper.to_array(proto)))
        return found.to(self._processor) if found.is_floating_point() else found


def _computed(value: _Value) -> Tensor:
    assert value is not None
    return value.a @ value.b if isinstance(value, _Product) else value


def _widened(value: Tensor | None) -> Any:
    narrow = value is not None and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if narrow and value is not None else value


def _without_use(
    step: _Step,
    names: Sequence[str],
    values: Sequence[_Value],
    given: Sequence[Tensor | None],
) -> list[Tensor]:
    """Return those inputs of an operation that have no use after it.

    Args:
        names, values: names and arrays of the inputs.
        given: the same arrays in fp32. The copy of a narrow array has no other use.
    """
    return [
        tensor
        for name, value, tensor in zip(names, values, given, strict=True)
        if tensor is not None and (name in step.free or tensor is not value)
    ]


def _fitting(free: Sequence[Tensor], given: Sequence[Tensor | None]) -> Tensor | None:
    """Return the first array in `free` whose shape equals the shape of the result for `given`."""
    for each in free:
        if (
            each.dtype is torch.float32
            and each.is_contiguous()
            and all(one is None or _broadcasts(one.shape, each.shape) for one in given)
        ):
            return each
    return None


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Return True if an array of shape `shape` can be broadcast to the shape `to`."""
    pairs = zip(shape[::-1], to[::-1], strict=False)
    return len(shape) <= len(to) and all(size in (1, wanted) for size, wanted in pairs)
