"""Choose the runner of a device's graphs: the fastest runner that is precise enough.

A self-test (see `cleave.machine.graph_trials`) measures how precise a runner is.

The PS may permit a graph's matrix products to be computed in bf16, with sums in fp32. Some runners
are then faster. So the runner of such graphs is chosen and tested separately.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from cleave.arrays import DType
from cleave.errors import UsageError
from cleave.machine import webgpu_session
from cleave.machine.backends import SHORT_NAMES, known_name, torch_devices
from cleave.machine.graph_narrowing import narrowed
from cleave.machine.graph_session import GraphError, GraphSession, NoGpuError, OpenGraph
from cleave.machine.graph_speed import LEAST_MEMORY_BYTES, measured_graphs
from cleave.machine.graph_trials import LARGEST_ERROR, accuracy

AUTO: Final = "auto"  # name that selects the fastest runner on the command line
CPU: Final = "cpu"  # the runner that every device has: ONNX Runtime on the CPU
_FORMER: Final = ("coreml", "directml")  # providers that installed services may still name
_NAMES: Final = (AUTO, CPU, webgpu_session.NAME, "torch", "torch:cpu", *SHORT_NAMES.values())

MakeGraph: TypeAlias = Callable[[bytes, Sequence[DType | None], DType | None], OpenGraph]
"""Opens a graph. The second argument is the dtype of each input, or None if the input is not
floating-point. The third is the 16-bit dtype in which matrix products may be computed, or None.
Raises GraphError."""


@dataclass(frozen=True, slots=True)
class Runner:
    """A library that runs graphs on one processor of this machine.

    Attributes:
        name: name on the command line, such as `torch:cuda`.
        memory_bytes: returns the free memory of the accelerator; infinity for the CPU.
        multiplies_in: the 16-bit dtypes in which the runner can compute matrix products.
    """

    name: str
    open: MakeGraph
    memory_bytes: Callable[[], float] = lambda: math.inf
    multiplies_in: Collection[DType] = ()


def open_on_cpu(
    model: bytes, given: Sequence[DType | None] = (), products: DType | None = None
) -> GraphSession:
    """Open a graph in ONNX Runtime on the CPU. 16-bit inputs are upcast during the run."""
    del products  # products are computed in fp32, which is always permitted
    return GraphSession(narrowed(model, given))


def open_in_torch(
    processor: str,
    model: bytes,
    given: Sequence[DType | None] = (),
    products: DType | None = None,
) -> OpenGraph:
    """Open a graph in PyTorch on the torch device `processor`."""
    from cleave.machine.torch_session import TorchSession  # imports torch

    return TorchSession(model, given, processor, products)


def open_in_process(
    model: bytes, given: Sequence[DType | None] = (), products: DType | None = None
) -> OpenGraph:
    """Open a graph on the CPU of a process that trains, with the runner that is usually fastest.

    The choice is not measured, so it is the same in every run. PyTorch runs graphs with products in
    bf16 if the CPU has instructions for them. ONNX Runtime runs all others.
    """
    if products is DType.BF16 and "torch" in sys.modules and cpu_multiplies_bf16():
        with suppress(GraphError):  # PyTorch may not support an operation of the graph
            return open_in_torch("cpu", model, given, products)
    return open_on_cpu(model, given)


def runners(*, torch: bool = True) -> list[Runner]:
    """Return the runners of this machine. The first is the CPU's.

    Args:
        torch: whether to import PyTorch, which needs 400 MB of memory, to find its processors.
    """
    found = [Runner(CPU, open_on_cpu)]
    if webgpu_session.installed():
        found.append(Runner(webgpu_session.NAME, open_on_webgpu))
    for each in torch_devices() if torch else ():
        memory = partial(_free_bytes, each)
        narrow = (DType.BF16,) if each != "cpu" or cpu_multiplies_bf16() else ()
        found.append(Runner(f"torch:{each}", partial(open_in_torch, each), memory, narrow))
    return found


def open_on_webgpu(
    model: bytes, given: Sequence[DType | None] = (), products: DType | None = None
) -> OpenGraph:
    """Open a graph on a GPU through WebGPU. 16-bit inputs are upcast before they are uploaded."""
    del given, products
    return webgpu_session.WebgpuSession(model)


def cpu_multiplies_bf16() -> bool:
    """Return True if the CPU has instructions for products in bf16. Other CPUs emulate them."""
    import torch

    able: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # new in torch 2.11
    return any(able.get(each) for each in ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16"))


def _free_bytes(processor: str) -> float:
    from cleave.machine.torch_session import free_bytes  # imports torch

    return free_bytes(processor)


def known_runner(name: str) -> str:
    """Return a runner's full name (`torch:cuda` for `cuda`); raise UsageError if unknown."""
    name = AUTO if name in _FORMER else SHORT_NAMES.get(name, name)
    if name not in _NAMES:
        raise UsageError(
            f"--runner {name!r} does not run graphs; use one of "
            f"{', '.join((*_NAMES, *SHORT_NAMES))}"
        )
    return name


def one_processor(backend: str, runner: str) -> tuple[str, str]:
    """Return the full names of the backend for tiles and of the runner for layers.

    If only one of them is named, the other one uses the same processor.

    Args:
        backend, runner: names on the command line.

    Raises:
        UsageError: if a name is unknown.

    Example:
        >>> one_processor("auto", "cuda")
        ('torch:cuda', 'torch:cuda')
    """
    backend, runner = known_name(backend), known_runner(runner)
    if backend == AUTO and runner != AUTO:  # tiles have no WebGPU here
        backend = CPU if runner in (CPU, "torch:cpu", webgpu_session.NAME) else runner
    elif runner == AUTO and backend not in (AUTO, "torch"):  # `torch` does not name a processor
        runner = CPU if backend in (CPU, "numpy", "torch:cpu") else backend
    return backend, runner


class GraphChoice:
    """Opens graphs with the fastest runner, which the first call chooses.

    The choice for graphs whose products may be in bf16 is made separately, because a processor may
    be several times as fast in bf16, or slower.

    This class is not thread-safe.

    Args:
        asked: the runner to use if it is available and has full fp32 precision; otherwise the CPU
            is used. `torch` means PyTorch on any processor. `auto` compares the CPU with all
            accelerators. `auto` and `cpu` use PyTorch on the CPU only for products in bf16, because
            in fp32 ONNX Runtime is up to twice as fast.
        notify: called with a message for each runner that is chosen or rejected, and for each graph
            that the CPU must run instead.
        largest_error: error in the self-test at which a runner is rejected for fp32.
    """

    def __init__(
        self,
        asked: str = AUTO,
        notify: Callable[[str], None] = lambda _: None,
        *,
        available: Callable[[], Sequence[Runner]] | None = None,
        speed: Callable[[MakeGraph, DType | None], float] | None = None,
        largest_error: float = LARGEST_ERROR,
    ) -> None:
        self._largest_error = largest_error
        self._asked = asked
        self._notify = notify
        self._available = available
        self._speed = speed
        self._runners: Sequence[Runner] = ()
        self._chosen: dict[DType | None, Examined] = {}  # by the dtype of products
        self._fault = ""  # why the last rejected runner must not be used

    def flops_per_s(self, products: DType | None = None) -> float:
        """Return the throughput of the chosen runner in a layer; 0 if no runner can be used.

        Args:
            products: the 16-bit dtype in which matrix products may be computed; None for fp32.
        """
        try:
            return self._choice(products).flops_per_s
        except GraphError:
            return 0.0

    def named(self, products: DType | None = None) -> str:
        """Return the chosen runner's name; empty if no runner can be used.

        Args:
            products: the 16-bit dtype in which matrix products may be computed; None for fp32.
        """
        try:
            return self._choice(products).runner.name
        except GraphError:
            return ""

    def accelerates(self, products: DType | None = None) -> bool:
        """Return True if the chosen runner uses an accelerator. `products` as in `named`."""
        return self.named(products) not in ("", CPU, "torch:cpu")

    @property
    def memory_bytes(self) -> float:
        """Return the free memory of the chosen runners' accelerators; infinity for the CPU.

        Return infinity, too, if no runner has been chosen.
        """
        return min((one.runner.memory_bytes() for one in self._chosen.values()), default=math.inf)

    def __call__(
        self, model: bytes, given: Sequence[DType | None] = (), products: DType | None = None
    ) -> OpenGraph:
        """Open a graph with the chosen runner, or on the CPU if that runner cannot run it.

        Args:
            given: dtype of each graph input; None for inputs that are not floating-point.
            products: the 16-bit dtype in which matrix products may be computed; None for fp32.

        Raises:
            GraphError: if the CPU cannot run the graph either, or no runner has full fp32
                precision.
        """
        chosen = self._choice(products)
        try:
            return chosen.runner.open(model, given, chosen.products)
        except GraphError as error:
            if chosen.runner.name == CPU:
                raise
            self._notify(f"the CPU runs a graph that {chosen.runner.name} cannot: {error}")
            return open_on_cpu(model, given)

    def _choice(self, products: DType | None) -> Examined:
        if None not in self._chosen:
            if self._fault:  # all runners were rejected before, even the CPU's
                raise GraphError(self._fault)
            self._chosen[None] = self._choose()
        if products is not None and products not in self._chosen:
            self._chosen[products] = self._choose_for(products, self._chosen[None])
        return self._chosen[products]

    def _choose_for(self, products: DType, exact: Examined) -> Examined:
        """Return the fastest way to run graphs whose products may be in a 16-bit dtype.

        `exact` is the choice for fp32, which is also a candidate.
        """
        wanted = [
            runner
            for runner in self._runners
            if products in runner.multiplies_in
            and (
                self._asked in (AUTO, runner.name, runner.name.partition(":")[0])
                or (self._asked == CPU and runner.name == "torch:cpu")
            )
        ]
        every = [exact, *(self._examined(runner, products) for runner in wanted)]
        for one in every[1:]:
            self._notify(one.text)
        fastest = max((one for one in every if not one.fault), key=lambda one: one.flops_per_s)
        if len(every) > 1:
            how = fastest.products.value if fastest.products else "fp32"
            self._notify(
                f"jobs in {products.value} will use {fastest.runner.name} with products in {how}, "
                f"the fastest here"
            )
        return fastest

    def _examined(self, runner: Runner, products: DType | None) -> Examined:
        return examined(runner, self._speed, products, self._largest_error)

    def _choose(self) -> Examined:
        """Return the fastest wanted runner that passes the self-test."""
        if self._available is None:
            # A device that multiplies with numpy should not load PyTorch to look for a GPU.
            torch = self._asked.startswith("torch") or "torch" in sys.modules
            cpu, *others = runners(torch=torch)
        else:
            cpu, *others = self._available()
        self._runners = (cpu, *others)
        wanted = [
            runner
            for runner in others
            if self._asked in (runner.name, runner.name.partition(":")[0])
            or (self._asked == AUTO and runner.name != "torch:cpu")
        ]
        if self._asked not in (AUTO, CPU) and not wanted:
            there = ", ".join(runner.name for runner in (cpu, *others))
            self._notify(
                f"there is no {self._asked} here, so the CPU runs layers; --runner takes {there}"
            )
        if self._asked in (AUTO, CPU):
            wanted.append(cpu)
        fastest = self._fastest(wanted) or (self._fastest([cpu]) if cpu not in wanted else None)
        if fastest is None:
            raise GraphError(self._fault)
        return fastest

    def _fastest(self, wanted: Sequence[Runner]) -> Examined | None:
        every = [self._examined(runner, None) for runner in wanted]
        for one in every:
            if not one.absent or self._asked != AUTO:
                self._notify(one.text)
        usable = [one for one in every if not one.fault]
        if not usable:
            self._fault = every[-1].text if every else self._fault
            return None
        fastest = max(usable, key=lambda one: one.flops_per_s)
        if len(usable) > 1:
            self._notify(f"{fastest.runner.name} is the fastest, so it runs layers")
        return fastest


@dataclass(frozen=True, slots=True)
class Examined:
    """The result of a runner's self-test, and its throughput in a layer.

    Attributes:
        fault: why the runner must not be used; empty if it passed.
        text: the result as a sentence without a full stop, for the user.
        products: the 16-bit dtype of the runner's matrix products; None for fp32.
        absent: whether the runner found no GPU.
    """

    runner: Runner
    fault: str
    text: str
    flops_per_s: float = 0.0
    products: DType | None = None
    absent: bool = False


def examined(
    runner: Runner,
    speed: Callable[[MakeGraph, DType | None], float] | None = None,
    products: DType | None = None,
    largest_error: float | None = None,
) -> Examined:
    """Test a runner's precision, and measure its speed if it passes.

    Args:
        speed: measures the throughput in a layer; `measured_graphs` by default.
        products: the 16-bit dtype in which the runner computes matrix products; None for fp32.
        largest_error: error at which the runner is rejected for fp32; `LARGEST_ERROR` by default.
    """
    name = f"{runner.name} with products in {products.value}" if products else runner.name
    try:
        if runner.memory_bytes() < LEAST_MEMORY_BYTES:
            raise GraphError("its accelerator has no memory left")
        found = accuracy(
            lambda model: runner.open(model, (), products), products, largest_error or LARGEST_ERROR
        )
        passed = found.error < found.allowed
        flops_per_s = (speed or measured_graphs)(runner.open, products) if passed else 0.0
    except Exception as error:  # noqa: BLE001 - a driver may raise anything; try other runners
        fault = str(error) or type(error).__name__
        absent = isinstance(error, NoGpuError)
        return Examined(runner, fault, f"{name} does not run layers: {fault}", absent=absent)
    off = f"largest error in its self-test: {found.error:.0e}"
    if not passed:
        dtype = products.value if products else "fp32"
        fault = f"{off} ({found.trial}), and {dtype} allows {found.allowed:.0e}"
        return Examined(runner, fault, f"{name} does not run layers: {fault}")
    text = f"{name} runs layers at {flops_per_s / 1e9:,.0f} GFLOP/s; {off}"
    return Examined(runner, "", text, flops_per_s, products)
