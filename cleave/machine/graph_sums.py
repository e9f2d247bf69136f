"""Finds outputs of a graph that are sums and can overwrite one of their inputs."""

from __future__ import annotations

from collections.abc import Mapping

from cleave.machine.onnx_graph import read_graph


def additions(model: bytes) -> Mapping[str, str]:
    """Return the input of each output that is an input plus something else.

    Only the addition uses that input, and an addition reads each element before writing it.

    Raises:
        ProtobufError: when the bytes are not a model.
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
