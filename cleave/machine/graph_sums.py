"""Finds graph outputs that are the sum of a graph input and something else.

Such an output, like an accumulated gradient, can overwrite the memory of the input.
"""

from __future__ import annotations

from collections.abc import Mapping

from cleave.machine.onnx_graph import read_graph


def additions(model: bytes) -> Mapping[str, str]:
    """Map each graph output that can overwrite a graph input to that input.

    Such an output is the result of an addition, and this addition is the only use of the input.
    Overwriting is safe because an addition reads each element before it writes the element.

    Raises:
        ProtobufError: when `model` is not a serialized ONNX model.
    """
    graph = read_graph(model)
    found = {}
    for node in graph.nodes:
        if node.operation != "Add" or node.outputs[0] not in graph.outputs:
            continue
        for name in node.inputs:
            if name in graph.inputs and graph.uses(name) == 1:
                found[node.outputs[0]] = name
                break
    return found
