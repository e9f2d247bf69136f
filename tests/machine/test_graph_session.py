"""Running graphs with ONNX Runtime, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from cleave.machine.graph_session import GraphError, GraphSession
from cleave.machine.onnx_graph import content
from tests.onnx_models import adding


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "also needs x, w"),
        ({"x": np.ones((2, 3), np.float64), "w": np.ones(3, np.float32)}, "cannot be run"),
        ({"x": np.ones((2, 4), np.float32), "w": np.ones(3, np.float32)}, "cannot be run"),
    ],
)
def test_wrong_inputs_are_refused(given: dict[str, np.ndarray], reason: str) -> None:
    with pytest.raises(GraphError, match=reason):
        GraphSession(adding(), threads=1).run(given)


@pytest.mark.parametrize("model", [b"", b"no model", adding()[:-9]])
def test_what_is_no_graph_is_refused(model: bytes) -> None:
    with pytest.raises(GraphError, match="refuses the graph"):
        GraphSession(model)


def test_a_graph_reads_no_file_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret.bin"
    secret.write_bytes(np.arange(3, dtype=np.float32).tobytes())
    monkeypatch.chdir(tmp_path)
    for location in ("secret.bin", str(secret), "../" + tmp_path.name + "/secret.bin"):
        with pytest.raises(GraphError, match="refuses the graph"):
            GraphSession(adding(constants=location))


def test_a_model_that_looks_like_another_format_is_read_as_onnx() -> None:
    """ONNX Runtime tells its own format by these letters, wherever else the bytes may come from."""
    model = content(6, "..ORTM") + adding()
    assert model[4:8] == b"ORTM"
    given = {"x": np.ones((2, 3), np.float32), "w": np.ones(3, np.float32)}
    np.testing.assert_array_equal(
        GraphSession(model, threads=1).run(given)["y"], np.full((2, 3), 2)
    )


def test_a_machine_without_onnx_runtime_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(GraphError, match="ONNX Runtime is not available"):
        GraphSession(adding())
