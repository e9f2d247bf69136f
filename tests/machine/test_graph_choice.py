"""Which provider runs graphs. Only the CPU's is here; others are that one, made worse."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from cleave.errors import UsageError
from cleave.machine.graph_choice import LARGEST_ERROR, GraphChoice, accuracy, installed, trials
from cleave.machine.graph_session import (
    CPU_SETUP,
    SETUPS,
    GraphError,
    GraphSession,
    Provider,
    ProviderSetup,
    parse_provider,
    setups_of,
)
from tests.onnx_models import adding

Array = npt.NDArray[Any]

ALL: Final = tuple(dict.fromkeys(setup.runtime_name for setup in SETUPS))


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
    """A machine with some providers.

    Attributes:
        there: which providers it has.
        given, found: what those beside the CPU round.
        exact: setups that do not round.
        refused: models that those beside the CPU cannot run; None for all.
        on_cpu: what of every graph they leave to the CPU.
        opened: the setups with which graphs were made ready.
        said: what its user was told.
    """

    there: tuple[str, ...] = ALL
    given: Callable[[Array], Array] = _exactly
    found: Callable[[Array], Array] = _exactly
    exact: tuple[ProviderSetup, ...] = (CPU_SETUP,)
    refused: tuple[bytes, ...] | None = ()
    on_cpu: dict[str, int] = field(default_factory=dict)
    opened: list[ProviderSetup] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def choice(self, asked: Provider | None = None) -> GraphChoice:
        return GraphChoice(
            asked, self.said.append, available=lambda: self.there, open_with=self.open
        )

    def open(self, model: bytes, setup: ProviderSetup) -> GraphSession:
        self.opened.append(setup)
        if setup != CPU_SETUP and (self.refused is None or model in self.refused):
            raise GraphError("its driver is missing")
        session = _Worse(model, threads=1)
        if setup not in self.exact:
            session.given, session.found = self.given, self.found
        if setup != CPU_SETUP:
            session.on_cpu = self.on_cpu
        return session


# --- the self-test ----------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_the_cpu_computes_exactly(threads: int) -> None:
    found = accuracy(lambda model: GraphSession(model, threads))
    assert found.full
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


def test_the_best_provider_that_is_there_is_taken() -> None:
    for there, best in (
        (ALL, Provider.CUDA),
        (ALL[1:], Provider.COREML),
        (ALL[2:], Provider.DIRECTML),
        (ALL[3:], Provider.CPU),
        (("TensorrtExecutionProvider", *ALL[2:]), Provider.DIRECTML),
        (("AzureExecutionProvider",), Provider.CPU),
    ):
        machine = _Machine(there)
        machine.choice()(adding())
        assert {setup.provider for setup in machine.opened} == {best}
        (said,) = machine.said
        assert said.startswith(best.value)
        assert "runs graphs" in said


def test_it_is_chosen_once_and_at_the_first_graph() -> None:
    machine = _Machine()
    choice = machine.choice()
    assert not machine.opened
    for _ in range(3):
        choice(adding())
    assert len(machine.opened) == len(list(trials())) + 3
    assert len(machine.said) == 1


def test_cuda_computes_in_full_precision() -> None:
    machine = _Machine()
    machine.choice()(adding())
    assert {setup.options.get("use_tf32") for setup in machine.opened} == {"0"}


@pytest.mark.parametrize("rounding", SHORT.values(), ids=SHORT)
def test_a_provider_that_is_not_exact_is_passed_over(rounding: tuple[Any, Any]) -> None:
    machine = _Machine(ALL, *rounding)
    session = machine.choice()(adding())
    x = np.array([[1 + 2**-20, 2, 3]], np.float32)
    np.testing.assert_array_equal(session.run({"x": x, "w": x[0]})["y"], 2 * x)
    *passed, taken = machine.said
    assert [text.partition(" ")[0] for text in passed] == [
        setup.provider.value for setup in SETUPS if setup != CPU_SETUP
    ]
    for text in passed:
        assert "does not run graphs: in its self-test it is off by" in text
        assert "fp32 by less than 2e-05" in text
    assert taken.startswith("cpu runs graphs")


@pytest.mark.parametrize("provider", [Provider.COREML, Provider.DIRECTML])
def test_a_provider_is_set_to_full_precision_where_it_can_be(provider: Provider) -> None:
    first, second = (setup for setup in SETUPS if setup.provider is provider)
    machine = _Machine(ALL, _keeping(10), exact=(CPU_SETUP, second))
    machine.choice(provider)(adding())
    assert machine.opened[-1] == second
    passed, taken = machine.said
    assert passed.startswith(f"{first} does not")
    assert taken.startswith(f"{second} runs graphs")


def test_a_provider_that_does_not_start_is_passed_over() -> None:
    machine = _Machine(refused=None)
    machine.choice()(adding())
    assert machine.opened[-1] == CPU_SETUP
    assert machine.said[0].endswith("does not run graphs: its driver is missing")


def test_the_cpu_runs_what_the_provider_cannot() -> None:
    machine = _Machine(refused=(adding(),))
    session = machine.choice()(adding())
    assert machine.opened[-2:] == [SETUPS[0], CPU_SETUP]
    assert session.run({"x": np.ones((1, 3), np.float32), "w": np.ones(3, np.float32)})
    assert machine.said[1] == "the CPU runs a graph that cuda cannot: its driver is missing"


def test_what_was_asked_for_is_taken() -> None:
    machine = _Machine()
    machine.choice(Provider.DIRECTML)(adding())
    assert {setup.provider for setup in machine.opened} == {Provider.DIRECTML}
    machine = _Machine()
    machine.choice(Provider.CPU)(adding())
    assert all(setup == CPU_SETUP for setup in machine.opened)
    assert len(machine.said) == 1


def test_what_was_asked_for_and_is_not_there_is_said() -> None:
    machine = _Machine(ALL[3:])
    machine.choice(Provider.CUDA)(adding())
    assert machine.opened[-1] == CPU_SETUP
    assert machine.said[0].startswith("ONNX Runtime has no cuda here, so the CPU runs graphs; ")


def test_a_machine_on_which_nothing_is_exact_runs_no_graph() -> None:
    machine = _Machine(ALL[3:], _keeping(10), exact=())
    choice = machine.choice()
    for _ in range(2):
        with pytest.raises(GraphError, match="cpu does not run graphs: in its self-test it is off"):
            choice(adding())
    assert len(machine.said) == 1
    assert len(machine.opened) == len(list(trials()))


def test_the_providers_of_this_machine_are_known() -> None:
    assert CPU_SETUP.runtime_name in installed()
    GraphChoice(available=installed)(adding())


def test_a_provider_that_cannot_be_loaded_is_no_provider() -> None:
    """ONNX Runtime takes the CPU in its place, and only tells when it is asked."""
    absent = next(setup for setup in SETUPS if setup.runtime_name not in installed())
    with (
        pytest.warns(UserWarning, match="not in available provider names"),
        pytest.raises(GraphError, match=f"cannot load {absent.provider.value} "),
    ):
        GraphSession(adding(), 1, absent)


@pytest.mark.parametrize(
    ("name", "provider"), [("auto", None), *((provider.value, provider) for provider in Provider)]
)
def test_users_name_providers(name: str, provider: Provider | None) -> None:
    assert parse_provider(name) is provider
    assert setups_of(provider, ALL)[0].provider is (provider or Provider.CUDA)
    assert setups_of(provider, ALL)[-1] is CPU_SETUP


def test_an_unknown_provider_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'tpu'.* use one of auto, cpu, directml, coreml, cuda"):
        parse_provider("tpu")


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
