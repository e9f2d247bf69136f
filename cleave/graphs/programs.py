"""Convert core ATen graphs to exported programs of `torch.export`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.export import graph_signature as signatures
from torch.utils import _pytree as pytree

from cleave.errors import LayerGraphError
from cleave.graphs.joint_graph import Part

_MOST_SAMPLES: Final = 65536


class CoreAtenProgram(torch.export.ExportedProgram):
    """An exported program in core ATen operations. Its decomposition step does nothing.

    The ONNX exporter would otherwise trace the program two more times to decompose its operations.
    """

    @classmethod
    def of(cls, part: Part) -> CoreAtenProgram | None:
        """Convert a traced graph to a program, or return None if a new trace is needed.

        A new trace is needed if the graph changes tensors in place, or if a loop body contains
        constant tensors.
        """
        nodes = list(all_nodes(part.graph))
        held = [node for node in nodes if _is_tensor_held(node, part.graph)]
        if any(map(changes_its_input, nodes)) or any(n.graph is not part.graph.graph for n in held):
            return None
        module, constants = _with_constants(part.graph, [str(node.target) for node in held])
        placeholders = module.graph.find_nodes(op="placeholder")
        shapes = placeholders[-1].meta["val"].fake_mode.shape_env
        results = module.graph.find_nodes(op="output")[0].args[0]
        example = tuple(part.inputs.values())
        return cls(
            module,
            module.graph,
            signatures.ExportGraphSignature(
                [_input(node.name, constant=node.name in constants) for node in placeholders],
                [_output(node.name) for node in results],
            ),
            state_dict={},
            range_constraints=dict(shapes.var_to_range),
            module_call_graph=[
                torch.export.ModuleCallEntry(
                    "",
                    torch.export.ModuleCallSignature(
                        [],
                        [],
                        pytree.tree_structure((example, {})),
                        pytree.tree_structure((0,) * len(results)),
                    ),
                )
            ],
            example_inputs=(example, {}),
            constants={**constants},
        )

    @classmethod
    def traced(cls, program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
        """Convert a program to a `CoreAtenProgram`. Programs with in-place changes stay as is."""
        if any(changes_its_input(node) for node in all_nodes(program.graph_module)):
            return program
        return cls(
            program.graph_module,
            program.graph,
            program.graph_signature,
            program.state_dict,
            program.range_constraints,
            program.module_call_graph,
            program.example_inputs,
            program.constants,
            verifiers=list(program.verifiers),
        )

    def run_decompositions(self, *_given: Any, **_how: Any) -> torch.export.ExportedProgram:
        return self


def traced_again(part: Part) -> torch.export.ExportedProgram:
    """Trace a graph again with `torch.export` and return the program.

    Raises:
        LayerGraphError: if the graph changes its inputs in place.
    """
    batch = torch.export.Dim("batch", min=1, max=_MOST_SAMPLES)
    dims = part.batch_dims
    shapes = tuple({dims[name]: batch} if name in dims else None for name in part.inputs)
    program = torch.export.export(
        part.graph, tuple(part.inputs.values()), dynamic_shapes=shapes, strict=False
    )
    signature = program.graph_signature
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        raise LayerGraphError("it changes its input tensors in place")
    return program


def all_nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield all nodes of a graph and of its subgraphs, such as loop bodies."""
    for each in module.modules():
        if isinstance(each, fx.GraphModule):
            yield from each.graph.nodes


def changes_its_input(node: fx.Node) -> bool:
    """Return True if a node's operation changes a tensor in place."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _with_constants(
    module: fx.GraphModule, names: Sequence[str]
) -> tuple[fx.GraphModule, dict[str, Tensor]]:
    """Return a graph in which the constant tensors named `names` are the first inputs.

    Also return the constant tensors by the names of the new input nodes.
    """
    if not names:
        return module, {}
    mode = module.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode
    graph = fx.Graph()
    tensors = {name: getattr(module, name) for name in names}
    given = {name: graph.placeholder(f"held_{number}") for number, name in enumerate(tensors)}
    for name, node in given.items():
        node.meta["val"] = mode.from_tensor(tensors[name])
    attributes = module.graph.find_nodes(op="get_attr")
    taken = {node: given[str(node.target)] for node in attributes if str(node.target) in given}
    graph.output(graph.graph_copy(module.graph, taken))
    return fx.GraphModule(module, graph), {node.name: tensors[name] for name, node in given.items()}


def _is_tensor_held(node: fx.Node, module: fx.GraphModule) -> bool:
    return node.op == "get_attr" and not isinstance(
        getattr(node.graph.owning_module or module, str(node.target), None), fx.GraphModule
    )


def _input(name: str, *, constant: bool) -> signatures.InputSpec:
    kind = signatures.InputKind.CONSTANT_TENSOR if constant else signatures.InputKind.USER_INPUT
    return signatures.InputSpec(kind, signatures.TensorArgument(name), name if constant else None)


def _output(name: str) -> signatures.OutputSpec:
    argument = signatures.TensorArgument(name)
    return signatures.OutputSpec(signatures.OutputKind.USER_OUTPUT, argument, target=None)
