"""Trace tensor functions and export them as ONNX models that accept any batch size.

Patches make torch's ONNX exporter faster without changing the exported graphs.
"""

from __future__ import annotations

import importlib
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from cleave.errors import LayerGraphError
from cleave.graphs.joint_graph import Part, Splitter
from cleave.graphs.programs import CoreAtenProgram, changes_its_input, traced_again
from cleave.machine.graph_arrays import UnboundedError
from cleave.machine.graph_memory import GivenInput, GraphMemory

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


_TABLES: Final = "torch.onnx._internal.exporter._registration"


_RULES: Final = "onnxscript.rewriter._rewrite_rule"


_TYPES: Final = "torch.onnx._internal.fx.passes.type_promotion"


_SIGNATURES: Final = "onnx_ir.schemas"


@contextmanager
def without_repetition() -> Iterator[None]:
    """Return a context manager in which torch's ONNX exporter is about twice as fast.

    The exported graphs are the same. The exporter caches its translation table (which takes 0.25 s
    to build) and the signatures of operations. It tries each rewrite rule only on operations that
    the rule can match. It skips type promotion for operations without a promotion rule. A patch is
    skipped if the installed version of torch or onnxscript does not have the patched function.
    """
    with ExitStack() as changes:
        for module, owner, name, change in (
            (_TABLES, "ONNXRegistry", "from_torchlib", _kept_table),
            (_SIGNATURES, "OpSignature", "from_op_schema", _kept_signatures),
            (_RULES, "RewriteRule", "try_rewrite", _where_it_can_match),
            (_TYPES, "_TypePromotionInterpreter", "run_node", _where_types_matter),
        ):
            changes.enter_context(_changed(module, owner, name, change))
        yield


@contextmanager
def _changed(
    module: str, owner: str, name: str, change: Callable[[Any, Any], Any]
) -> Iterator[None]:
    """Within the context, replace a class attribute, if it exists, with `change(class, value)`."""
    try:
        changed: Any = getattr(importlib.import_module(module), owner)
        made = vars(changed)[name]
    except (ImportError, AttributeError, KeyError):
        yield
        return
    setattr(changed, name, change(changed, made))
    try:
        yield
    finally:
        setattr(changed, name, made)


def _kept_table(tables: Any, made: Any) -> Any:
    def from_torchlib(**version: int) -> Any:
        table = copy(_table(made.__get__(None, tables), **version))
        table.functions = {name: list(found) for name, found in table.functions.items()}
        return table

    return staticmethod(from_torchlib)


@cache
def _table(made: Callable[..., Any], **version: int) -> Any:
    return made(**version)


def _kept_signatures(signatures: Any, made: Any) -> Any:
    kept: dict[Any, Any] = {}

    def from_op_schema(schema: Any) -> Any:
        key = schema.domain, schema.name, schema.since_version
        if key not in kept:
            kept[key] = made.__get__(None, signatures)(schema)
        return kept[key]

    return staticmethod(from_op_schema)


def _where_it_can_match(_: Any, made: Callable[..., Any]) -> Any:
    """Return a `try_rewrite` that skips operations that cannot match the end of a pattern."""
    ends: dict[Any, Any] = {}

    def try_rewrite(rule: Any, model: Any, graph: Any, node: Any, **how: Any) -> Any:
        if rule not in ends:
            ends[rule] = _last_operation(rule)
        if ends[rule] not in (None, (node.domain, node.op_type)):
            return None
        return made(rule, model, graph, node, **how)

    return try_rewrite


def _last_operation(rule: Any) -> Any:
    """Return the domain and name of a pattern's last operation, or None if it is not fixed."""
    try:
        named = rule._target_pattern.output_nodes[0].op_identifier()
    except (AttributeError, IndexError):
        return None
    return named and named[:2]


def _where_types_matter(_: Any, made: Callable[..., Any]) -> Any:
    def run_node(interpreter: Any, node: Any) -> Any:
        packet = getattr(node.target, "overloadpacket", None)
        known = node.op == "call_function" and packet is not None and "val" in node.meta
        if known and interpreter.type_promotion_table.get_rule(packet) is None:
            return node.meta["val"]
        return made(interpreter, node)

    return run_node


# A larger serialized graph contains constant tensors that should be inputs.
MAX_GRAPH_BYTES: Final = 4 * 2**20

MAX_GRAPH_NODES: Final = 4096  # including subgraphs; devices refuse larger graphs

# Reasons for the user, by a pattern for the class name of the module whose tracing failed.
_KINDS: Final = {
    "Expert|Moe|MoE|MOE|Router": "it has experts ({0}), and tokens select which of them run",
    "Rotary|Rope": "its position embeddings ({0}) depend on the sequence length",
    "Mamba|Mixer|Recurrent|Rwkv|DeltaNet|Ssm|SSM": "it keeps a state along the sequence ({0})",
}

_LOGGERS: Final = ("torch.onnx", "torch._subclasses", "onnxscript", "onnx_ir")


@dataclass(frozen=True)
class TracedGraph:
    """A function to trace, with descriptions of its inputs and outputs.

    Attributes:
        function: takes the inputs by name and returns the outputs in order.
        inputs: an example of each input by name. The values are ignored. Floating-point inputs
            become fp32.
        outputs: names of the outputs, in order.
        varying: names of the inputs whose first dimension is the batch.
    """

    function: Callable[[Mapping[str, Tensor]], tuple[Tensor, ...]]
    inputs: Mapping[str, Tensor]
    outputs: Sequence[str]
    varying: Set[str]


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings and logs that are meant for the exporter's developers."""
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in levels:
            logging.getLogger(name).setLevel(logging.CRITICAL)  # logged errors are raised as well
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


@contextmanager
def _reasons() -> Iterator[None]:
    """Convert any exception that tracing raises within the context to a `LayerGraphError`."""
    try:
        with _quiet():
            yield
    except LayerGraphError:
        raise
    except Exception as error:
        raise LayerGraphError(_reason(error)) from error


@_reasons()
def to_onnx(traced: TracedGraph) -> bytes:
    """Export a function as a serialized ONNX model without the function's unused inputs.

    Raises:
        LayerGraphError: if the function cannot be traced, or draws random numbers.
    """
    graph, inputs = core_aten(traced)
    refuse_chance(graph)
    return _to_onnx(Part(graph, inputs, dict.fromkeys(traced.varying, 0), traced.outputs))


@_reasons()
def to_onnx_split(
    traced: TracedGraph, gradient: str, of_forward: int, name: Callable[[int], str]
) -> tuple[bytes, bytes, bytes, dict[str, int]]:
    """Export a function and its gradient as separate forward and backward ONNX models.

    Args:
        traced: one function that computes both the outputs and the gradients.
        gradient: name of the input that is the gradient of the forward pass's output.
        of_forward: number of leading outputs that the forward pass computes.
        name: maps the index of an activation to its name.

    Returns:
        Three serialized graphs: forward, backward with recomputed activations, and backward with
        activations as inputs. Then the number of elements per sample of each activation, by name.
    """
    graph, inputs = core_aten(traced)
    refuse_chance(graph)
    splitter = Splitter(graph, inputs, traced.varying & inputs.keys(), gradient, name)
    parts, activations = splitter.split(traced.outputs, of_forward)
    forward, backward, from_activations = map(_to_onnx, parts)
    return forward, backward, from_activations, activations


def _to_onnx(part: Part) -> bytes:
    if (known := CoreAtenProgram.of(part)) is not None:
        try:
            return _checked(_translated(known, part), part)
        except torch.onnx.OnnxExporterError:
            pass  # a second trace may decompose the operation that has no ONNX translation
    program = traced_again(part)
    try:
        return _checked(_translated(CoreAtenProgram.traced(program), part), part)
    except torch.onnx.OnnxExporterError:  # some operations must be decomposed before translation
        return _checked(_translated(program, part), part)


def _translated(program: torch.export.ExportedProgram, part: Part) -> Any:
    with without_repetition():
        model = torch.onnx.export(
            program,
            input_names=list(part.inputs),
            output_names=list(part.outputs),
            dynamo=True,
            verbose=False,
        )
    assert model is not None
    return model.model_proto


def _reason(error: Exception) -> str:
    """Convert an exception from torch to the reason why a function cannot be exported."""
    name = _innermost(error)
    for part, kind in _KINDS.items():
        if re.search(part, name):
            return kind.format(name)
    said = _chain(error)
    if "complex-valued" in said:
        return "it computes with complex numbers, which graphs do not support"
    if (operation := re.search(r"No ONNX function found for .*?'aten\.(\w+)'", said)) is not None:
        return f"it needs the operation {operation[1]}, which graphs do not support"
    return f"its {name} does something that cannot be traced as a graph"


def _innermost(error: Exception) -> str:
    """Return the class name of a traceback's innermost `nn.Module` outside torch, or "code"."""
    found = "code"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and not type(owner).__module__.startswith("torch."):
            found = type(owner).__name__
    return found


def _chain(error: BaseException) -> str:
    """Return the messages of an error and its causes, one per line, with the root cause first."""
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return "\n".join(reversed(texts))


@_reasons()
def core_aten(traced: TracedGraph) -> tuple[fx.GraphModule, dict[str, Tensor]]:
    """Trace a function to core ATen operations.

    Returns:
        The graph without unused inputs, and examples of the remaining inputs by name, in order.

    Raises:
        LayerGraphError: if the function cannot be traced.
    """
    inputs = _examples(traced.inputs, traced.varying)

    def function(*given: Tensor) -> tuple[Tensor, ...]:
        with _Traceable():
            return traced.function(dict(zip(inputs, given, strict=True)))

    graph = _made(function, inputs, traced.varying)
    if any(map(changes_its_input, graph.graph.nodes)):
        # A changed tensor may be an activation, which would then have the changed values.
        graph = _made(torch.func.functionalize(function), inputs, traced.varying)
        if any(map(changes_its_input, graph.graph.nodes)):
            raise LayerGraphError("it changes its input tensors in place")
    for node in graph.graph.find_nodes(op="get_attr"):
        held = getattr(graph, str(node.target), None)
        if isinstance(held, Tensor) and held.requires_grad:  # only inputs have a gradient
            raise LayerGraphError("it uses a trained tensor that is not one of its parameters")
    used = {}
    for node, name in zip(graph.graph.find_nodes(op="placeholder"), list(inputs), strict=True):
        if node.users:
            used[name] = inputs[name]
        else:
            graph.graph.erase_node(node)
    graph.recompile()
    return graph, used


def _made(
    function: Callable[..., Any], inputs: Mapping[str, Tensor], varying: Set[str]
) -> fx.GraphModule:
    """Trace a function to core ATen operations and replace in-place operations where possible."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with _without_values(inputs, varying) as (given, shapes):
        graph = make_fx(function, _decompositions())(*given)
        if shapes.guards or shapes.replacements:
            raise LayerGraphError("its computation depends on the size of the batch")
    _make_functional(graph.graph)
    graph.graph.eliminate_dead_code()
    return graph


def _make_functional(graph: fx.Graph) -> None:
    """Replace in-place operations in a graph, unless another operation may read the changed memory.

    Some of PyTorch's gradient formulas contain in-place operations that no decomposition removes.
    """
    for node in graph.nodes:
        if not changes_its_input(node):
            continue
        changed = node.args[0]
        others = [user for user in changed.users if user is not node]
        if not any(user > node for user in others) and not any(map(_shares, [changed, *others])):
            name = node.target._schema.name.removeprefix("aten::").removesuffix("_")
            node.target = getattr(getattr(torch.ops.aten, name), node.target._overloadname)


def _shares(node: fx.Node) -> bool:
    """Return True if a node's result may share memory with another tensor."""
    target = node.target
    return not isinstance(target, torch._ops.OpOverload) or any(
        result.alias_info for result in target._schema.returns
    )


class _Traceable(TorchFunctionMode):
    """Torch function mode that replaces functions that cannot be traced correctly.

    A linear layer becomes a product and a sum, because torch's own function with a bias would fix
    the batch size. A random number that decides whether a layer is skipped becomes a `_Draw`.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.linear:
            return _linear(*args, **(kwargs or {}))
        if func is torch.rand and args == ([],) and not kwargs:
            return _Draw()
        return func(*args, **(kwargs or {}))


class _Draw:
    """Placeholder for a random number from 0 to 1, whose value is unknown during tracing."""

    def __lt__(self, probability: float) -> bool:
        if probability > 0:
            raise LayerGraphError("it drops layers at random; set its layerdrop to 0")
        return False


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = input @ weight.t()
    return product if bias is None else product + bias


def _examples(inputs: Mapping[str, Tensor], varying: Set[str]) -> dict[str, Tensor]:
    """Return example inputs whose batch size differs from the size of every other dimension.

    Tracing treats sizes that are equal in the examples as equal for every batch.
    """
    own = {n for name, t in inputs.items() for n in t.shape[name in varying :]}
    samples = next(n for n in count(3) if n not in own)
    found = {}
    for name, tensor in inputs.items():
        shape = (samples, *tensor.shape[1:]) if name in varying else tensor.shape
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        found[name] = torch.zeros(shape, dtype=dtype)  # uses no memory until it is written
    return found


@contextmanager
def _without_values(
    inputs: Mapping[str, Tensor], varying: Set[str]
) -> Iterator[tuple[list[Tensor], ShapeEnv]]:
    """Yield fake tensors for the inputs, and the `ShapeEnv` that records assumed sizes."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    found: list[Tensor] = []
    for name, tensor in inputs.items():
        sizes = [DimDynamic.STATIC] * tensor.dim()
        if name in varying:
            sizes[0] = DimDynamic.DUCK  # all inputs with the same batch size share one symbol
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
        source = ConstantSource(name)
        found.append(mode.from_tensor(tensor, symbolic_context=context, source=source))
    with mode, enable_python_dispatcher():
        yield found, shapes


def refuse_chance(graph: fx.GraphModule) -> None:
    """Raise LayerGraphError if a graph draws random numbers, as dropout does."""
    for node in graph.graph.nodes:
        target = node.target
        if (
            isinstance(target, torch._ops.OpOverload)
            and torch.Tag.nondeterministic_seeded in target.tags
        ):
            raise LayerGraphError("it drops values at random; set its dropout to 0")


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    from torch._decomp import core_aten_decompositions

    table: dict[Any, Callable[..., Any]] = {**core_aten_decompositions()}
    table[torch.ops.aten.empty_permuted.default] = _empty_permuted
    table[torch.ops.aten.squeeze.dims] = _squeeze
    table[torch.ops.aten.slice_backward.default] = _slice_backward
    return table


def _empty_permuted(size: Sequence[int], physical_layout: Sequence[int], **how: Any) -> Tensor:
    return torch.zeros(size, dtype=how.get("dtype"))


def _squeeze(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    """Remove dimensions of size 1 with `view`, because the exporter does not support `squeeze`."""
    gone = {dim % tensor.dim() for dim in dims if tensor.shape[dim] == 1}
    return tensor.view([size for dim, size in enumerate(tensor.shape) if dim not in gone])


def _slice_backward(
    grad: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Tensor:
    """Compute the gradient of a slice's input by padding, which needs no constant index tensors."""
    dim %= grad.dim()
    before = min(start, sizes[dim]) if start >= 0 else start + sizes[dim]
    if step > 1:  # insert zeros after each element
        grad = _padded(grad.unsqueeze(dim + 1), dim + 1, 0, step - 1).flatten(dim, dim + 1)
        grad = grad.narrow(dim, 0, min(grad.shape[dim], sizes[dim] - before))
    return _padded(grad, dim, before, sizes[dim] - before - grad.shape[dim])


def _padded(tensor: Tensor, dim: int, before: int, after: int) -> Tensor:
    """Pad dimension `dim` with `before` zeros at the start and `after` zeros at the end."""
    later = tensor.dim() - 1 - dim
    padded: Tensor = torch.ops.aten.constant_pad_nd.default(
        tensor, [0, 0] * later + [before, after], 0.0
    )
    return padded


def _checked(model: Any, part: Part) -> bytes:
    """Serialize an exported model without metadata, and check it against the devices' limits."""
    if any(domain.domain for domain in model.opset_import):
        raise LayerGraphError("it needs operations that ONNX does not have")
    nodes = list(_nodes(model.graph))
    if len(nodes) > MAX_GRAPH_NODES:
        raise LayerGraphError(
            f"its graph has {len(nodes)} operations; the limit is {MAX_GRAPH_NODES}"
        )
    for node in nodes:
        del node.metadata_props[:]
        node.doc_string = ""
        node.name = ""
    del model.graph.value_info[:]
    del model.graph.metadata_props[:]
    del model.metadata_props[:]
    del model.functions[:]
    written: bytes = model.SerializeToString(deterministic=True)
    if len(written) > MAX_GRAPH_BYTES:
        raise LayerGraphError(f"its graph is {len(written)} bytes; the limit is {MAX_GRAPH_BYTES}")
    given = [GivenInput(part.inputs[value.name].numel()) for value in model.graph.input]
    try:
        GraphMemory(written).peak_bytes(given, [False] * len(part.outputs))
    except UnboundedError as error:
        raise LayerGraphError(f"devices cannot tell what memory its graph needs: {error}") from None
    return written


def _nodes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)
