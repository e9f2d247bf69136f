"""Small ONNX models."""

from onnx import TensorProto, helper


def adding(constants: str = "") -> bytes:
    """y = x + w, where x has any number of rows; w is an input, or read from a file."""
    held = []
    if constants:
        w = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3])
        w.data_location = TensorProto.EXTERNAL
        location = w.external_data.add()
        location.key, location.value = "location", constants
        held.append(w)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "adding",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3]),
            *([] if held else [helper.make_tensor_value_info("w", TensorProto.FLOAT, [3])]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        held,
    )
    opsets = [helper.make_opsetid("", 18)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return model
