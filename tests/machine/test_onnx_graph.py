"""Small models that are written without the `onnx` package."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.machine.graph_session import GraphSession
from cleave.machine.onnx_graph import (
    ArrayType,
    Node,
    ProtobufError,
    content,
    fields,
    integer,
    integers,
    written,
)


def test_a_written_model_is_one_and_runs() -> None:
    model = written(
        [
            Node("Gather", ["table", "rows"], ["found"], {"axis": 0}),
            Node("ScatterElements", ["found", "where", "ones"], ["y"], {"reduction": "add"}),
        ],
        {"table": ArrayType(["batch", 2]), "rows": ArrayType([3], "int64")},
        {"y": ArrayType([3, 2])},
        {"where": np.array([[0, 2]]), "ones": np.ones((1, 2), np.float32)},
    )
    onnx.checker.check_model(onnx.load_from_string(model), full_check=True)
    table = np.arange(8, dtype=np.float32).reshape(4, 2)
    found = GraphSession(model, threads=1).run({"table": table, "rows": np.array([3, 1, 0])})
    np.testing.assert_array_equal(found["y"], [[7, 7], [2, 3], [0, 2]])


@given(st.integers(1, 2**29 - 1), st.integers(-(2**63), 2**64 - 1), st.binary(max_size=300))
def test_what_is_written_is_read(number: int, value: int, held: bytes) -> None:
    message = integer(number, value) + content(number, held)
    assert list(fields(memoryview(message))) == [(number, value % 2**64), (number, held)]


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_packed_integers_are_read(values: list[int]) -> None:
    packed = b"".join(integer(1, value)[1:] for value in values)
    assert list(integers(memoryview(packed))) == values


@pytest.mark.parametrize(
    "message",
    [
        "08", "0880", "08" + "ff" * 10 + "01", "0a05", "0a0541414141", "0d000000", "0900",
        "00", "0001", "0b", "0c", "0e", "0f", "888080801001", "0affffffffffffffff7f",
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused(message: str) -> None:
    with pytest.raises(ProtobufError):
        list(fields(memoryview(bytes.fromhex(message))))
