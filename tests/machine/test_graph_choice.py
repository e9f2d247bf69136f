"""What runs graphs. Only CPUs are here; others are ONNX Runtime's, made worse."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from cleave.arrays import DType
from cleave.machine import webgpu_session
from cleave.machine.graph_choice import (
    AUTO,
    CPU,
    GraphChoice,
    Runner,
    examined,
    known_runner,
    one_processor,
    runners,
)
from cleave.machine.graph_session import GraphError, GraphSession, NoGpuError
from cleave.machine.graph_trials import LARGEST_ERROR, accuracy, trials
from tests.onnx_models import adding

Array = npt.NDArray[Any]

ALL: Final = {CPU: 2e11, "torch:cpu": 1e11, "torch:cuda": 5e13, "torch:mps": 1e13}


def _exactly(array: Array) -> Array:
    return array


def _keeping(bits: int) -> Callable[[Array], Array]:
    """Round fp32 to so many bits of its fraction; TF32 has 10, bf16 has 7."""

    def rounded(array: Array) -> Array:
        if array.dtype != np.float32:
            return array
        dropped = 23 - bits
        wide = array.view(np.uint32).astype(np.uint64) + (1 << (dropped - 1))
        return ((wide >> dropped) << dropped).astype(np.uint32).view(np.float32)

    return rounded


def _halved(array: Array) -> Array:
    """Round fp32 to fp16, whose numbers are small as well as short."""
    if array.dtype != np.float32:
        return array
    with np.errstate(over="ignore"):
        return array.astype(np.float16).astype(np.float32)


class _Worse(GraphSession):
    """The CPU's, which rounds what it is given or what it returns."""

    given: Callable[[Array], Array] = staticmethod(_exactly)
    found: Callable[[Array], Array] = staticmethod(_exactly)

    def run(
        self, given: Mapping[str, Array], wanted: Sequence[str] | None = None
    ) -> dict[str, Array]:
        rounded = {name: self.given(array) for name, array in given.items()}
        found = super().run(rounded, wanted)
        return {name: self.found(array) for name, array in found.items()}


def _cpu(model: bytes) -> GraphSession:
    return GraphSession(model, threads=1)


@dataclass
class _Machine:
    """A machine with some runners.

    Attributes:
        there: names of its runners, and their speeds.
        given, found: what those beside the CPU round.
        exact: runners that do not round.
        refused: models that those beside the CPU cannot run; None for all.
        opened: the runners with which graphs were opened.
        said: what its user was told.
    """

    there: dict[str, float] = field(default_factory=lambda: dict(ALL))
    given: Callable[[Array], Array] = _exactly
    found: Callable[[Array], Array] = _exactly
    exact: tuple[str, ...] = (CPU,)
    refused: tuple[bytes, ...] | None = ()
    opened: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def choice(self, asked: str = AUTO) -> GraphChoice:
        runners = {partial(self.open, name): name for name in self.there}

        def speed(opens: Any, products: DType | None) -> float:
            return self.there[runners[opens]]

        every = [Runner(name, opens) for opens, name in runners.items()]
        return GraphChoice(asked, self.said.append, available=lambda: every, speed=speed)

    def open(
        self,
        name: str,
        model: bytes,
        given: Sequence[DType | None] = (),
        products: DType | None = None,
    ) -> GraphSession:
        self.opened.append(f"{name} {products.value}" if products else name)
        if name != CPU and (self.refused is None or model in self.refused):
            raise GraphError("its driver is missing")
        session = _Worse(model, threads=1)
        if name not in self.exact:
            session.given, session.found = self.given, self.found
        return session


# --- the self-test ----------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_the_cpu_computes_exactly(threads: int) -> None:
    found = accuracy(lambda model: GraphSession(model, threads))
    assert found.error < LARGEST_ERROR / 5


def _worse(given: Callable[[Array], Array], found: Callable[[Array], Array]) -> Any:
    def open_worse(model: bytes) -> _Worse:
        session = _Worse(model, threads=1)
        session.given, session.found = given, found
        return session

    return open_worse


SHORT: Final = {
    "TF32": (_keeping(10), _exactly),
    "bf16": (_keeping(7), _exactly),
    "fp16": (_halved, _exactly),
    "results in fp16": (_exactly, _halved),
    "results in bf16": (_exactly, _keeping(7)),
    "no numbers": (_exactly, lambda array: np.full_like(array, np.nan)),
    "too large": (_exactly, lambda array: np.full_like(array, np.inf)),
    "another shape": (_exactly, lambda array: array[:1, :1]),
}


@pytest.mark.parametrize("name", [trial.name for trial in trials()])
def test_each_trial_notices_fewer_bits_by_itself(name: str) -> None:
    """An engine may compute some operations in 16 bits, and others not."""
    (trial,) = (trial for trial in trials() if trial.name == name)
    assert trial.error(_cpu(trial.model)) < LARGEST_ERROR / 5
    assert trial.error(_worse(_halved, _halved)(trial.model)) >= 1e-4


# --- the choice -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "fastest"),
    [
        (ALL, "torch:cuda"),
        (ALL | {"torch:mps": 1e15}, "torch:mps"),
        ({CPU: 2e11, "torch:cpu": 1e15}, CPU),  # not compared unless asked for
        ({CPU: 2e12, "torch:cuda": 1e12}, CPU),
        ({CPU: 2e11}, CPU),
    ],
)
def test_the_fastest_runner_is_taken(there: dict[str, float], fastest: str) -> None:
    machine = _Machine(there)
    choice = machine.choice()
    choice(adding())
    assert machine.opened[-1] == fastest
    assert choice.flops_per_s() == there[fastest]
    assert choice.named() == fastest
    assert choice.accelerates() == (fastest != CPU)
    compared = [name for name in there if name != "torch:cpu"]
    told = [text for text in machine.said if " runs layers at " in text]
    assert sorted(text.partition(" ")[0] for text in told) == sorted(compared)
    assert machine.said[len(compared) :] == (
        [f"{fastest} is the fastest, so it runs layers"] if len(compared) > 1 else []
    )


def test_it_is_chosen_once_and_at_the_first_graph() -> None:
    machine = _Machine()
    choice = machine.choice()
    assert not machine.opened
    for _ in range(3):
        choice(adding())
    assert len(machine.opened) == 3 * len(list(trials())) + 3
    assert len(machine.said) == 4


@pytest.mark.parametrize("rounding", SHORT.values(), ids=SHORT)
def test_a_runner_that_is_not_exact_is_passed_over(rounding: tuple[Any, Any]) -> None:
    machine = _Machine(dict(ALL), *rounding)
    session = machine.choice()(adding())
    x = np.array([[1 + 2**-20, 2, 3]], np.float32)
    np.testing.assert_array_equal(session.run({"x": x, "w": x[0]})["y"], 2 * x)
    *passed, taken = machine.said
    assert [text.partition(" ")[0] for text in passed] == ["torch:cuda", "torch:mps"]
    for text in passed:
        assert "does not run layers: largest error in its self-test:" in text
        assert "fp32 allows 2e-05" in text
    assert taken.startswith("cpu runs layers at 200 GFLOP/s; largest error in its self-test:")


def test_a_runner_that_does_not_start_is_passed_over() -> None:
    machine = _Machine(refused=None)
    machine.choice()(adding())
    assert machine.opened[-1] == CPU
    assert machine.said[0].endswith("does not run layers: its driver is missing")


@pytest.mark.parametrize("asked", [AUTO, "webgpu"])
def test_a_machine_without_a_gpu_says_so_only_if_it_was_asked_for(asked: str) -> None:
    def absent(model: bytes, given: Any = (), products: Any = None) -> GraphSession:
        raise NoGpuError("no GPU")

    def exact(model: bytes, given: Any = (), products: Any = None) -> GraphSession:
        return GraphSession(model, 1)

    every = [Runner(CPU, exact), Runner("webgpu", absent)]
    said: list[str] = []
    choice = GraphChoice(asked, said.append, available=lambda: every, speed=lambda *_: 1e9)
    assert choice.flops_per_s() > 0
    assert any("no GPU" in text for text in said) == (asked != AUTO)


@pytest.mark.parametrize(
    ("at", "words"), [("upload", "out of memory"), ("speed", "out of memory"), ("upload", "")]
)
def test_an_accelerator_that_breaks_is_passed_over(at: str, words: str) -> None:
    """Its driver may raise anything, also when memory runs out in the measurement of speed."""

    class Broken(GraphSession):
        def upload(self, array: Array) -> Array:
            raise RuntimeError(words)

    def broken(model: bytes, given: Any = (), products: Any = None) -> GraphSession:
        return Broken(model, 1)

    def exact(model: bytes, given: Any = (), products: Any = None) -> GraphSession:
        return GraphSession(model, 1)

    def speed(opens: Any, products: DType | None) -> float:
        if opens is broken:
            raise GraphError(words)
        return 1e9

    every = [Runner(CPU, exact), Runner("torch:xyz", broken)]
    said: list[str] = []
    choice = GraphChoice(
        AUTO, said.append, available=lambda: every, speed=speed if at == "speed" else None
    )
    assert choice.flops_per_s() > 0
    assert choice.memory_bytes == np.inf
    assert said[0] == f"torch:xyz does not run layers: {words or 'RuntimeError'}"
    assert said[-1].startswith("cpu runs layers at ")


def test_the_cpu_runs_what_the_runner_cannot() -> None:
    machine = _Machine(refused=(adding(),))
    session = machine.choice()(adding())
    assert session.run({"x": np.ones((1, 3), np.float32), "w": np.ones(3, np.float32)})
    assert machine.said[-1] == "the CPU runs a graph that torch:cuda cannot: its driver is missing"


@pytest.mark.parametrize(
    ("asked", "tested"),
    [
        (CPU, {CPU}),
        ("torch:mps", {"torch:mps"}),
        ("torch:cpu", {"torch:cpu"}),
        ("torch", {"torch:cpu", "torch:cuda", "torch:mps"}),
    ],
)
def test_what_was_asked_for_is_taken(asked: str, tested: set[str]) -> None:
    machine = _Machine()
    machine.choice(asked)(adding())
    assert set(machine.opened) == tested
    assert machine.opened[-1] == max(tested, key=lambda name: ALL[name])


def test_what_was_asked_for_and_is_not_there_is_said() -> None:
    machine = _Machine({CPU: 2e11})
    machine.choice("torch:cuda")(adding())
    assert machine.opened[-1] == CPU
    assert machine.said[0] == (
        "there is no torch:cuda here, so the CPU runs layers; --runner takes cpu"
    )


@pytest.mark.parametrize("asked", ["torch:cuda", CPU, AUTO])
def test_a_machine_on_which_nothing_is_exact_runs_no_graph(asked: str) -> None:
    machine = _Machine({CPU: 2e11, "torch:cuda": 1e12}, _keeping(10), exact=())
    choice = machine.choice(asked)
    for _ in range(2):
        with pytest.raises(
            GraphError, match="cpu does not run layers: largest error in its self-test"
        ):
            choice(adding())
    assert choice.flops_per_s() == 0
    assert choice.memory_bytes == np.inf
    assert len(machine.said) == (1 if asked == CPU else 2)


@pytest.mark.parametrize(
    ("in_bf16", "bits", "opened"),
    [(9e12, 8, "torch:cuda bf16"), (2e12, 8, "torch:cuda"), (9e12, 5, "torch:cuda")],
)
def test_products_in_bf16_are_computed_so_where_that_is_faster_and_precise(
    in_bf16: float, bits: int, opened: str
) -> None:
    """The fp32 runner is taken if bf16 is slower, or if products have only 5 bits."""
    machine = _Machine(exact=(*ALL,))

    def open_one(model: bytes, given: Any = (), products: DType | None = None) -> GraphSession:
        machine.opened.append(f"torch:cuda {products.value}" if products else "torch:cuda")
        session = _Worse(model, threads=1)
        if products and b"MatMul" in model:
            session.given = session.found = _keeping(bits)
        return session

    def speed(opens: Any, products: DType | None) -> float:
        return {None: 5e12, DType.BF16: in_bf16}[products] if opens is open_one else 2e11

    every = [
        Runner(CPU, partial(machine.open, CPU)),
        Runner("torch:cuda", open_one, multiplies_in=(DType.BF16,)),
    ]
    choice = GraphChoice(AUTO, machine.said.append, available=lambda: every, speed=speed)
    for products, runner in ((DType.BF16, opened), (None, "torch:cuda")):
        choice(adding(), (), products)
        assert machine.opened[-1] == runner
    assert choice.flops_per_s() == 5e12
    assert choice.flops_per_s(DType.BF16) == (in_bf16 if opened.endswith("bf16") else 5e12)
    assert any("with products in bf16 does not run layers" in said for said in machine.said) == (
        bits < 8
    )


def test_the_runners_of_this_machine_are_exact() -> None:
    every = [examined(runner, lambda *_: 1e9) for runner in runners()]
    names = [one.runner.name for one in every]
    assert [name for name in names if name != webgpu_session.NAME][:2] == ["cpu", "torch:cpu"]
    # WebGPU finds no GPU where the plugin is installed for the tests.
    assert all(one.runner.name == webgpu_session.NAME for one in every if one.fault), every
    torch_cpu = next(one for one in runners() if one.name == "torch:cpu")
    narrow = examined(torch_cpu, lambda *_: 1e9, DType.BF16)
    assert not narrow.fault, narrow
    assert narrow.text.startswith("torch:cpu with products in bf16 runs layers at 1 GFLOP/s")


@pytest.mark.parametrize(
    ("name", "known"),
    [("coreml", AUTO), ("auto", AUTO), ("cpu", CPU), ("cuda", "torch:cuda"), ("torch", "torch")],
)
def test_users_name_runners(name: str, known: str) -> None:
    assert known_runner(name) == known


@pytest.mark.parametrize(
    ("backend", "runner", "both"),
    [
        ("auto", "auto", ("auto", "auto")),
        ("auto", "cuda", ("torch:cuda", "torch:cuda")),
        ("auto", "cpu", ("cpu", CPU)),
        ("auto", "torch:cpu", ("cpu", "torch:cpu")),
        ("auto", "webgpu", ("cpu", "webgpu")),
        ("mps", "auto", ("torch:mps", "torch:mps")),
        ("numpy", "auto", ("numpy", CPU)),
        ("torch", "auto", ("torch", "auto")),
        ("numpy", "cuda", ("numpy", "torch:cuda")),
    ],
)
def test_one_option_decides_for_tiles_and_layers(
    backend: str, runner: str, both: tuple[str, str]
) -> None:
    assert one_processor(backend, runner) == both


def test_a_device_imports_onnx_runtime_at_its_first_graph() -> None:
    """It takes a quarter of a second and 20 MB, and most devices are never sent a graph."""
    code = (
        "import sys\n"
        "import cleave_cli.commands.join, cleave.device.compute_thread, cleave.device.session\n"
        "from cleave.machine.graph_choice import GraphChoice\n"
        "choice = GraphChoice()\n"
        "assert not {'onnxruntime', 'numpy.random'} & set(sys.modules)\n"
        f"choice({adding()!r})\n"
        "assert 'onnxruntime' in sys.modules\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)
