"""Which outputs of a graph are sums that can be computed in the memory of what is added to."""

from __future__ import annotations

from collections.abc import Mapping

from cleave.machine.onnx_graph import read_graph


def additions(model: bytes) -> Mapping[str, str]:
    """Return, for outputs that are an input plus something else, that input.

    Nothing but the addition takes the input, so that nothing needs it once the output is there, and
    an addition reads an element before it writes that element.

    Raises:
        ProtobufError: when it is no model.
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
