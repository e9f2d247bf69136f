"""Graphs whose operations round coarsely."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from cleave.arrays import Array, DType
from cleave.graphs.noise import noisy, with_narrow_products
from cleave.machine.graph_session import GraphSession, OpenGraph
from cleave.machine.torch_session import TorchSession

AMPLITUDE = 2.0**-12


def model_of(nodes: list[onnx.NodeProto], shape: list[int]) -> bytes:
    """Return a model of x and w with one output y."""
    types = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, size)
        for name, size in (("x", [8, 16]), ("w", [16, 4]), ("y", shape))
    }
    graph = helper.make_graph(nodes, "graph", [types["x"], types["w"]], [types["y"]])
    opsets = [helper.make_opsetid("", 20)]
    made: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return made


def runs_of(
    model: bytes, open_graph: Callable[[bytes], OpenGraph] = GraphSession
) -> tuple[Array, list[Array]]:
    """Return what a model computes, and what it does with noise, several times."""
    rng = np.random.default_rng(1)
    given = {
        "x": rng.standard_normal((8, 16), np.float32),
        "w": rng.standard_normal((16, 4), np.float32),
    }
    session = open_graph(noisy(model, AMPLITUDE))
    return GraphSession(model).run(given)["y"], [session.run(given)["y"] for _ in range(3)]


@pytest.mark.parametrize("open_graph", [GraphSession, TorchSession])
def test_each_run_rounds_otherwise_within_the_amplitude(
    open_graph: Callable[[bytes], OpenGraph],
) -> None:
    model = model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], [8, 4])
    wanted, found = runs_of(model, open_graph)
    for one in found:
        off, size = np.abs(one - wanted), np.abs(wanted)
        assert (off / size).max() > 0.5 * AMPLITUDE
        # Two libraries add up in different orders, which matters most where terms cancel.
        assert (off < 1.01 * AMPLITUDE * size + 1e-6).all()
    assert not np.array_equal(found[0], found[1])


@pytest.mark.parametrize(
    ("operation", "inputs"),
    [("MatMul", ["x", "w"]), ("Gemm", ["x", "w"]), ("Gemm", ["x", "w", "w_row"])],
)
def test_products_in_bf16_are_those_of_a_device(operation: str, inputs: list[str]) -> None:
    """PyTorch and the server round the same numbers, a product before it is added to an array."""
    row = helper.make_node("ReduceSum", ["w"], ["w_row"], keepdims=0, noop_with_empty_axes=0)
    model = model_of([row, helper.make_node(operation, inputs, ["y"])], [8, 4])
    rng = np.random.default_rng(1)
    given = {
        "x": rng.standard_normal((8, 16), np.float32),
        "w": rng.standard_normal((16, 4), np.float32),
    }
    exact = GraphSession(model).run(given)["y"]
    mine = GraphSession(with_narrow_products(model)).run(given)["y"]
    theirs = TorchSession(model, products=DType.BF16).run(given)["y"]
    assert np.abs(mine - exact).mean() > 2.0**-11 * np.abs(exact).mean()
    np.testing.assert_allclose(theirs, mine, rtol=1e-5, atol=1e-5)


def test_noise_shows_where_results_cancel() -> None:
    product = helper.make_node("MatMul", ["x", "w"], ["one"])
    other = helper.make_node("MatMul", ["x", "w"], ["two"])
    wanted, found = runs_of(
        model_of([product, other, helper.make_node("Sub", ["one", "two"], ["y"])], [8, 4])
    )
    assert not wanted.any()
    assert all(np.abs(one).max() > AMPLITUDE / 2 for one in found)


def test_what_only_moves_numbers_or_rounds_each_alike_is_exact() -> None:
    nodes = [
        helper.make_node("Transpose", ["x"], ["turned"]),
        helper.make_node("Add", ["turned", "turned"], ["y"]),
    ]
    wanted, found = runs_of(model_of(nodes, [16, 8]))
    assert all(np.array_equal(one, wanted) for one in found)


def test_graphs_in_graphs_round_coarsely_too() -> None:
    inner = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["inner"])],
        "inner",
        [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, [8, 4])],
    )
    yes = helper.make_node("Constant", [], ["yes"], value_int=1)
    cast = helper.make_node("Cast", ["yes"], ["true"], to=TensorProto.BOOL)
    branch = helper.make_node("If", ["true"], ["y"], then_branch=inner, else_branch=inner)
    wanted, found = runs_of(model_of([yes, cast, branch], [8, 4]))
    assert all(0.5 * AMPLITUDE < np.abs(one / wanted - 1).max() < 1.01 * AMPLITUDE for one in found)
