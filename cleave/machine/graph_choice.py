"""Chooses ONNX Runtime's execution provider for graphs.

The choice is the best available provider that computes in full fp32 precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from cleave.arrays import DType
from cleave.machine.graph_narrowing import narrowed
from cleave.machine.graph_provider import CPU_SETUP, Provider, ProviderSetup, setups_of
from cleave.machine.graph_self_test import LARGEST_ERROR, accuracy
from cleave.machine.graph_session import GraphError, GraphSession

OpenSession: TypeAlias = Callable[[bytes, ProviderSetup], GraphSession]
"""Opens a session for a graph with a provider setup; raises GraphError if that fails."""

_HEAVY: Final = ("MatMul", "Gemm", "Einsum", "Conv", "Attention", "Scan", "If")
"""Names of the operations that take most of a layer's compute time. The name of a fused operation
contains the name of such an operation."""


def installed() -> tuple[str, ...]:
    """Return ONNX Runtime's names of the installed execution providers.

    Raises:
        GraphError: when ONNX Runtime is not installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise GraphError(f"ONNX Runtime is not there: {error}") from None
    return tuple(onnxruntime.get_available_providers())


def open_session(model: bytes, setup: ProviderSetup) -> GraphSession:
    """Open a session with the default number of threads (see `GraphSession`)."""
    return GraphSession(model, setup=setup)


class GraphChoice:
    """Opens sessions with the best provider, which is chosen when the first graph arrives.

    The choice is late because it imports ONNX Runtime, and most devices never receive a graph. This
    class is not thread-safe.

    Args:
        asked: the provider to use if it is available and has full fp32 precision; otherwise the CPU
            is used. None to choose among all providers.
        notify: called with a sentence for each provider that is chosen or rejected, and for each
            graph that the CPU must run.
        available: returns ONNX Runtime's names of the available providers.
        open_with: opens a session for a graph.
    """

    def __init__(
        self,
        asked: Provider | None = None,
        notify: Callable[[str], None] = lambda _: None,
        *,
        available: Callable[[], Sequence[str]] = installed,
        open_with: OpenSession = open_session,
    ) -> None:
        self._asked = asked
        self._notify = notify
        self._available = available
        self._open = open_with
        self._chosen: ProviderSetup | None = None
        self._fault = ""  # why the last rejected setup must not be used

    def __call__(self, model: bytes, given: Sequence[DType | None] = ()) -> GraphSession:
        """Open a session for a graph with the chosen provider.

        The CPU runs the graphs and operations that the provider does not support.

        Args:
            model: the graph as a serialized ONNX model.
            given: dtype of each graph input; None for inputs that are not floating-point. On the
                CPU, graphs take 16-bit inputs without an upcast before the run.

        Raises:
            GraphError: when the CPU cannot run the graph either, or when no provider has full fp32
                precision.
        """
        setup = self._setup()
        if setup == CPU_SETUP:
            return self._open(narrowed(model, given), setup)
        try:
            session = self._open(model, setup)
        except GraphError as error:
            self._notify(f"the CPU runs a graph that {setup.provider.value} cannot: {error}")
            return self._open(narrowed(model, given), CPU_SETUP)
        heavy = _heavy(session.on_cpu)
        if heavy:
            self._notify(
                f"the CPU runs parts of a graph that {setup.provider.value} has not: {heavy}"
            )
        return session

    def _setup(self) -> ProviderSetup:
        if self._chosen is None:
            if self._fault:  # all setups were rejected before, even the CPU's
                raise GraphError(self._fault)
            self._chosen = self._choose()
        return self._chosen

    def _choose(self) -> ProviderSetup:
        """Return the first provider setup that passes the self-test.

        Raises:
            GraphError: when no setup passes the self-test.
        """
        setups = setups_of(self._asked, self._available())
        if self._asked and setups[0].provider is not self._asked:
            self._notify(
                f"ONNX Runtime has no {self._asked.value} here, so the CPU runs graphs; install a "
                f"build that has it, or leave out --provider {self._asked.value}"
            )
        for setup in setups:
            fault = self._fault_of(setup)
            if fault is None:
                return setup
            self._fault = f"{setup} does not run graphs: {fault}"
            self._notify(self._fault)
        raise GraphError(self._fault)

    def _fault_of(self, setup: ProviderSetup) -> str | None:
        """Run the self-test with a provider setup.

        Returns:
            Why the setup must not be used; None if it passes.
        """
        try:
            found = accuracy(lambda model: self._open(model, setup))
        except GraphError as error:
            return str(error)
        if not found.full:
            return (
                f"in its self-test it is off by {found.error:.0e} ({found.trial}), and fp32 by "
                f"less than {LARGEST_ERROR:.0e}"
            )
        self._notify(
            f"{setup} runs graphs; in its self-test it is off by {found.error:.0e} at most "
            f"({found.trial})"
        )
        return None


def _heavy(operations: Mapping[str, int]) -> str:
    """Return the compute-intensive operations among `operations` and their counts, as text."""
    return ", ".join(
        f"{count} {name}"
        for name, count in sorted(operations.items())
        if any(part in name for part in _HEAVY)
    )
