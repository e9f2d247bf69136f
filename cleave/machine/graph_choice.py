"""Chooses what runs a device's graphs: the fastest runner that computes in full fp32 precision.

A runner may compute fp32 graphs in 16 bits, or in the 19 bits of TF32. Imprecise results look
plausible but change the trained model. So each runner computes small graphs on inputs for which low
precision causes large errors, and the results are compared with fp64 results.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

import numpy as np

from cleave.arrays import Array, DType
from cleave.errors import UsageError
from cleave.machine.backends import SHORT_NAMES, torch_devices
from cleave.machine.graph_narrowing import narrowed
from cleave.machine.graph_session import GraphError, GraphSession, OpenGraph
from cleave.machine.graph_speed import LEAST_MEMORY_BYTES, measured_graphs
from cleave.machine.onnx_graph import ArrayType, Node, written

AUTO: Final = "auto"  # name that selects the fastest runner on the command line
CPU: Final = "cpu"  # the runner that every device has: ONNX Runtime on the CPU
_FORMER: Final = ("coreml", "directml")  # providers that installed services may still name
_NAMES: Final = (AUTO, CPU, "torch", "torch:cpu", *SHORT_NAMES.values())

MakeGraph: TypeAlias = Callable[[bytes, Sequence[DType | None]], OpenGraph]
"""Opens a graph. The second argument is the dtype of each input, or None if the input is not
floating-point. Raises GraphError."""


@dataclass(frozen=True, slots=True)
class Runner:
    """A library that runs graphs on one processor of this machine.

    Attributes:
        name: name on the command line, such as `torch:cuda`.
        memory_bytes: returns the free memory of the accelerator; infinity for the CPU.
    """

    name: str
    open: MakeGraph
    memory_bytes: Callable[[], float] = lambda: math.inf


def open_on_cpu(model: bytes, given: Sequence[DType | None] = ()) -> GraphSession:
    """Open a graph in ONNX Runtime on the CPU. 16-bit inputs are upcast during the run."""
    return GraphSession(narrowed(model, given))


def open_in_torch(processor: str, model: bytes, given: Sequence[DType | None] = ()) -> OpenGraph:
    """Open a graph in PyTorch on the torch device `processor`."""
    from cleave.machine.torch_session import TorchSession  # imports torch

    return TorchSession(model, given, processor)


def runners(*, torch: bool = True) -> list[Runner]:
    """Return the runners of this machine. The first is the CPU's.

    Args:
        torch: whether to import PyTorch, which needs 400 MB of memory, to find its processors.
    """
    found = [Runner(CPU, open_on_cpu)]
    for each in torch_devices() if torch else ():
        memory = partial(_free_bytes, each)
        found.append(Runner(f"torch:{each}", partial(open_in_torch, each), memory))
    return found


def _free_bytes(processor: str) -> float:
    from cleave.machine.torch_session import free_bytes  # imports torch

    return free_bytes(processor)


def known_runner(name: str) -> str:
    """Return a runner's full name (`torch:cuda` for `cuda`); raise UsageError if unknown."""
    name = AUTO if name in _FORMER else SHORT_NAMES.get(name, name)
    if name not in _NAMES:
        raise UsageError(
            f"--runner {name!r} runs no graphs; use one of {', '.join((*_NAMES, *SHORT_NAMES))}"
        )
    return name


class GraphChoice:
    """Opens graphs with the fastest runner, which the first call chooses.

    This class is not thread-safe.

    Args:
        asked: the runner to use if it is available and has full fp32 precision; otherwise the CPU
            is used. `torch` means PyTorch on any processor. `auto` compares the CPU with all
            accelerators, but not with PyTorch on the CPU, where ONNX Runtime is up to twice as
            fast.
        notify: called with a message for each runner that is chosen or rejected, and for each graph
            that the CPU must run instead.
    """

    def __init__(
        self,
        asked: str = AUTO,
        notify: Callable[[str], None] = lambda _: None,
        *,
        available: Callable[[], Sequence[Runner]] | None = None,
        speed: Callable[[MakeGraph], float] | None = None,
    ) -> None:
        self._asked = asked
        self._notify = notify
        self._available = available
        self._speed = speed
        self._chosen: tuple[Runner, float] | None = None
        self._fault = ""  # why the last rejected runner must not be used

    @property
    def flops_per_s(self) -> float:
        """Return the throughput of the chosen runner in a layer; 0 if no runner can be used."""
        try:
            return self._choice()[1]
        except GraphError:
            return 0.0

    @property
    def memory_bytes(self) -> float:
        """Return the free memory of the chosen runner's accelerator; infinity for the CPU.

        It is infinity, too, if no runner has been chosen.
        """
        return math.inf if self._chosen is None else self._chosen[0].memory_bytes()

    def __call__(self, model: bytes, given: Sequence[DType | None] = ()) -> OpenGraph:
        """Open a graph with the chosen runner, or on the CPU if that runner cannot run it.

        Args:
            given: dtype of each graph input; None for inputs that are not floating-point.

        Raises:
            GraphError: if the CPU cannot run the graph either, or no runner has full fp32
                precision.
        """
        runner, _ = self._choice()
        try:
            return runner.open(model, given)
        except GraphError as error:
            if runner.name == CPU:
                raise
            self._notify(f"the CPU runs a graph that {runner.name} cannot: {error}")
            return open_on_cpu(model, given)

    def _choice(self) -> tuple[Runner, float]:
        if self._chosen is None:
            if self._fault:  # all runners were rejected before, even the CPU's
                raise GraphError(self._fault)
            self._chosen = self._choose()
        return self._chosen

    def _choose(self) -> tuple[Runner, float]:
        """Return the fastest wanted runner that passes the self-test, and its FLOP/s."""
        if self._available is None:
            # A device that multiplies with numpy should not load PyTorch to look for a GPU.
            torch = self._asked.startswith("torch") or "torch" in sys.modules
            cpu, *others = runners(torch=torch)
        else:
            cpu, *others = self._available()
        wanted = [
            runner
            for runner in others
            if self._asked in (runner.name, runner.name.partition(":")[0])
            or (self._asked == AUTO and runner.name != "torch:cpu")
        ]
        if self._asked not in (AUTO, CPU) and not wanted:
            there = ", ".join(runner.name for runner in (cpu, *others))
            self._notify(
                f"there is no {self._asked} here, so the CPU runs graphs; --runner takes {there}"
            )
        if self._asked in (AUTO, CPU):
            wanted.append(cpu)
        fastest = self._fastest(wanted) or (self._fastest([cpu]) if cpu not in wanted else None)
        if fastest is None:
            raise GraphError(self._fault)
        return fastest

    def _fastest(self, wanted: Sequence[Runner]) -> tuple[Runner, float] | None:
        every = [examined(runner, self._speed) for runner in wanted]
        for one in every:
            self._notify(one.text)
        usable = [one for one in every if not one.fault]
        if not usable:
            self._fault = every[-1].text if every else self._fault
            return None
        fastest = max(usable, key=lambda one: one.flops_per_s)
        if len(usable) > 1:
            self._notify(f"{fastest.runner.name} is the fastest, so it runs graphs")
        return fastest.runner, fastest.flops_per_s


@dataclass(frozen=True, slots=True)
class Examined:
    """The result of a runner's self-test, and its throughput in a layer.

    Attributes:
        fault: why the runner must not be used; empty if it passed.
        text: the result as a sentence without a full stop, for the user.
    """

    runner: Runner
    fault: str
    text: str
    flops_per_s: float = 0.0


def examined(runner: Runner, speed: Callable[[MakeGraph], float] | None = None) -> Examined:
    """Test a runner's precision, and measure its speed if it passes.

    Args:
        speed: measures the throughput in a layer; `measured_graphs` by default.
    """
    try:
        if runner.memory_bytes() < LEAST_MEMORY_BYTES:
            raise GraphError("its accelerator has no memory left")
        found = accuracy(lambda model: runner.open(model, ()))
        flops_per_s = (speed or measured_graphs)(runner.open) if found.full else 0.0
    except Exception as error:  # noqa: BLE001 - a driver may raise anything; try other runners
        fault = str(error) or type(error).__name__
        return Examined(runner, fault, f"{runner.name} does not run graphs: {fault}")
    off = f"in its self-test it is off by {found.error:.0e}"
    if not found.full:
        fault = f"{off} ({found.trial}), and fp32 by less than {LARGEST_ERROR:.0e}"
        return Examined(runner, fault, f"{runner.name} does not run graphs: {fault}")
    text = f"{runner.name} runs graphs at {flops_per_s / 1e9:,.0f} GFLOP/s; {off}"
    return Examined(runner, "", text, flops_per_s)


LARGEST_ERROR: Final = 2e-5
"""Relative error at which a runner is rejected. In the trials, the error of fp32 is at most 2e-6,
and the error of TF32 is 3e-4."""

_SEED: Final = 20
_DEPTH: Final = 4096  # number of terms in a dot product, as in wide layers


@dataclass(frozen=True, slots=True)
class Trial:
    """A test graph with its inputs and the expected fp64 outputs.

    Errors are relative to each element if `each` is true, and otherwise to the largest element.
    """

    name: str
    model: bytes
    given: Mapping[str, Array]
    wanted: Mapping[str, Array]
    each: bool = False

    def error(self, graph: OpenGraph) -> float:
        """Run the trial and return the largest relative error (infinite for NaN or bad shapes)."""
        found = graph.run(self.given)
        return max(
            _error(found[name], wanted, np.abs(wanted) if self.each else np.abs(wanted).max())
            for name, wanted in self.wanted.items()
        )


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The largest relative error in a trial, and the name of that trial."""

    error: float
    trial: str

    @property
    def full(self) -> bool:
        """Return True if the error is small enough for full fp32 precision."""
        return self.error < LARGEST_ERROR


def accuracy(open_graph: Callable[[bytes], OpenGraph]) -> Accuracy:
    """Run all trials and return the worst result. `open_graph` opens a session for a model."""
    found = (Accuracy(trial.error(open_graph(trial.model)), trial.name) for trial in trials())
    return max(found, key=lambda accuracy: accuracy.error)


def trials() -> Iterator[Trial]:
    """Yield all trials. Every call yields the same trials with the same inputs."""
    random = np.random.default_rng(_SEED)

    def normal(*shape: int) -> Array:
        return random.standard_normal(shape, np.float32)

    yield _products(normal(8, _DEPTH), normal(_DEPTH, 64), normal(_DEPTH, 32), normal(_DEPTH, 16))
    yield _attention(normal(4, 32, 64), normal(4, 64, 32), normal(4, 32, 64))
    yield _exponentials(np.linspace(-20, 20, 4001, dtype=np.float32).reshape(1, -1))
    yield _curves(np.linspace(-9, 9, 4001, dtype=np.float32).reshape(1, -1))
    yield _normalization(3 * normal(8, 768) + 1, normal(768), normal(768))
    yield _rows(normal(64, 32), random.integers(0, 64, (48,)), random.integers(0, 16, (48, 32)))
    yield _reductions(random.random((4, 16 * _DEPTH), np.float32))


def _products(x: Array, w: Array, left: Array, right: Array) -> Trial:
    """Return a trial of long dot products in which the terms largely cancel."""
    model = written(
        [
            Node("MatMul", ["x", "w"], ["y"]),
            Node("Transpose", ["left"], ["turned"]),
            Node("MatMul", ["turned", "right"], ["dw"]),
        ],
        {
            "x": _batch(_DEPTH),
            "w": ArrayType(w.shape),
            "left": _batch(32),
            "right": _batch(16),
        },
        {"y": _batch(64), "dw": ArrayType([32, 16])},
    )
    given = {"x": x, "w": w, "left": left, "right": right}
    wide = {name: array.astype(np.float64) for name, array in given.items()}
    wanted = {"y": wide["x"] @ wide["w"], "dw": wide["left"].T @ wide["right"]}
    return Trial("deep products", model, given, wanted)


def _attention(q: Array, k: Array, v: Array) -> Trial:
    """Return a trial of attention: two matrix multiplications and a softmax, with varied scores."""
    model = written(
        [
            Node("MatMul", ["q", "k"], ["scores"]),
            Node("Softmax", ["scores"], ["weights"], {"axis": -1}),
            Node("MatMul", ["weights", "v"], ["y"]),
        ],
        {"q": _batch(32, 64), "k": _batch(64, 32), "v": _batch(32, 64)},
        {"y": _batch(32, 64)},
    )
    scores = q.astype(np.float64) @ k
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return Trial("softmax", model, {"q": q, "k": k, "v": v}, {"y": weights @ v.astype(np.float64)})


def _exponentials(x: Array) -> Trial:
    model = written(
        [Node("Exp", ["x"], ["y"])], {"x": _batch(x.shape[1])}, {"y": _batch(x.shape[1])}
    )
    return Trial("exponentials", model, {"x": x}, {"y": np.exp(x.astype(np.float64))}, each=True)


def _curves(x: Array) -> Trial:
    operations = ("Sigmoid", "Tanh", "Erf")
    width = x.shape[1]
    model = written(
        [Node(operation, ["x"], [operation]) for operation in operations],
        {"x": _batch(width)},
        {operation: _batch(width) for operation in operations},
    )
    wide = x.astype(np.float64)
    wanted = {
        "Sigmoid": 1 / (1 + np.exp(-wide)),
        "Tanh": np.tanh(wide),
        "Erf": np.array([[math.erf(value) for value in wide[0]]]),
    }
    return Trial("curves", model, {"x": x}, wanted)


def _normalization(x: Array, scale: Array, shift: Array) -> Trial:
    width = x.shape[1]
    model = written(
        [
            Node("LayerNormalization", ["x", "scale", "shift"], ["layer"]),
            Node("Mul", ["x", "x"], ["squares"]),
            Node("ReduceMean", ["squares", "last"], ["mean"]),
            Node("Sqrt", ["mean"], ["root"]),
            Node("Reciprocal", ["root"], ["inverse"]),
            Node("Mul", ["x", "inverse"], ["rms"]),
        ],
        {"x": _batch(width), "scale": ArrayType([width]), "shift": ArrayType([width])},
        {"layer": _batch(width), "rms": _batch(width)},
        {"last": np.array([-1], "<i8")},
    )
    wide = x.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    layer = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + shift
    rms = wide / np.sqrt((wide**2).mean(-1, keepdims=True))
    given = {"x": x, "scale": scale, "shift": shift}
    return Trial("normalization", model, given, {"layer": layer, "rms": rms})


def _rows(table: Array, rows: Array, places: Array) -> Trial:
    """Return a trial that gathers rows of a table and adds their elements with a scatter."""
    model = written(
        [
            Node("Gather", ["table", "rows"], ["found"], {"axis": 0}),
            Node("ScatterElements", ["zeros", "places", "found"], ["y"], {"reduction": "add"}),
        ],
        {
            "table": _batch(32),
            "rows": ArrayType(rows.shape, "int64"),
            "places": ArrayType(places.shape, "int64"),
            "zeros": ArrayType([16, 32]),
        },
        {"found": ArrayType([48, 32]), "y": ArrayType([16, 32])},
    )
    zeros = np.zeros((16, 32), np.float32)
    found = table.astype(np.float64)[rows]
    y = zeros.astype(np.float64)
    np.add.at(y, (places, np.arange(32)), found)
    given = {"table": table, "rows": rows, "places": places, "zeros": zeros}
    return Trial("gather and scatter", model, given, {"found": found, "y": y})


def _reductions(x: Array) -> Trial:
    """Return a trial of long sums of positive numbers, for which 16-bit accumulation fails."""
    model = written(
        [
            Node("ReduceSum", ["x", "last"], ["sum"]),
            Node("LogSoftmax", ["x"], ["logs"], {"axis": -1}),
        ],
        {"x": _batch(x.shape[1])},
        {"sum": _batch(1), "logs": _batch(x.shape[1])},
        {"last": np.array([-1], "<i8")},
    )
    wide = x.astype(np.float64)
    logs = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    return Trial("reductions", model, {"x": x}, {"sum": wide.sum(-1, keepdims=True), "logs": logs})


def _batch(*shape: int) -> ArrayType:
    return ArrayType(["batch", *shape])


def _error(found: Array, wanted: Array, scale: Array) -> float:
    if found.shape != wanted.shape:
        return math.inf
    off = float((np.abs(found.astype(np.float64) - wanted) / scale).max())
    return math.inf if math.isnan(off) else off
