"""A graph, ready to be run by ONNX Runtime on what this machine has."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from cleave.arrays import DType
from cleave.errors import CleaveError
from cleave.machine.graph_provider import CPU_SETUP, ProviderSetup
from cleave.machine.graph_sums import additions
from cleave.machine.protobuf import ProtobufError

Array: TypeAlias = npt.NDArray[Any]

_NO_MESSAGES: Final = 4  # of five levels; what fails is raised
_NARROW: Final = {"tensor(bfloat16)": DType.BF16, "tensor(float16)": DType.FP16}
_ONNX_ELEMENT: Final = {DType.BF16: 16, DType.FP16: 10}  # ONNX's numbers of types


def available() -> bool:
    """Say whether graphs can be run here, without importing ONNX Runtime."""
    return importlib.util.find_spec("onnxruntime") is not None


class GraphError(CleaveError):
    """A graph cannot be run here."""


class GraphSession:
    """One graph, optimized for this machine.

    ONNX Runtime is imported here and not before: it takes a quarter of a second and 20 MB.

    Args:
        model: the ONNX model. It can hold no code, and nothing outside it is read.
        threads: how many threads compute; None for what `OMP_NUM_THREADS` says, as numpy and torch
            take it, or as many as there are cores.
        setup: what computes, and the CPU what that cannot.
        shares_memory: whether it works in memory that such sessions of this process have together,
            which is held until the process ends. With memory of its own, each of a layer's two
            graphs would hold what its largest run took.

    Attributes:
        inputs: the shape of every input by name; the batch's size is a text in it.
        outputs: names of the outputs, in order.
        narrow: the dtype of inputs that are 16-bit numbers; see `graph_narrowing`.
        in_place: inputs by name of outputs that may be written in their memory; see `run_into`.
        on_cpu: how many operations of which name the CPU computes although another provider was
            asked for; none where ONNX Runtime is too old to tell.

    Raises:
        GraphError: when ONNX Runtime is not installed, has no such provider or refuses the model.
    """

    def __init__(
        self,
        model: bytes,
        threads: int | None = None,
        setup: ProviderSetup = CPU_SETUP,
        *,
        shares_memory: bool = True,
    ) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise GraphError(f"ONNX Runtime is not there: {error}") from None
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _NO_MESSAGES
        options.intra_op_num_threads = _threads() if threads is None else threads
        options.inter_op_num_threads = 1
        # A plan of memory, made in the first run, is held from the second on beside what the first
        # one took: of a layer with 4096 tokens, 750 MB where 450 MB suffice, and no time is saved.
        options.enable_mem_pattern = False
        if shares_memory:
            _make_shared_memory()
            options.add_session_config_entry("session.use_env_allocators", "1")
        # It would make one of equal casts of a parameter, and hold that from its first use to its
        # last. Layers that torch exported have nothing else that is there twice. What follows from
        # constants would be made at once and held to the end, however large it is.
        disabled = ["CommonSubexpressionElimination", "ConstantFolding"]
        # A graph could name files of this machine as its constants; there is no such folder.
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path",
            os.path.join(os.devnull, "nothing"),
        )
        # What looks like ONNX Runtime's own format was not checked as that, and may be anything.
        options.add_session_config_entry("session.load_model_format", "ONNX")
        # Threads that spin while they wait would slow what else this machine does.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        providers = [(setup.runtime_name, dict(setup.options))]
        if setup != CPU_SETUP:
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
            providers.append((CPU_SETUP.runtime_name, {}))
        try:
            # Without its fallback, which prints what failed and takes the CPU.
            self._session = onnxruntime.InferenceSession(
                model, options, providers, enable_fallback=0, disabled_optimizers=disabled
            )
        except Exception as error:  # noqa: BLE001 - ONNX Runtime has no base class of its errors
            raise GraphError(f"ONNX Runtime refuses the graph: {_first_line(error)}") from None
        if setup.runtime_name not in self._session.get_providers():
            raise GraphError(f"ONNX Runtime cannot load {setup} here")
        self.on_cpu: Mapping[str, int] = _on_cpu(self._session) if setup != CPU_SETUP else {}
        # A size that is not a number is the batch's, which may be any.
        self.inputs: Mapping[str, Sequence[int | str]] = {
            given.name: tuple(given.shape) for given in self._session.get_inputs()
        }
        self.outputs = tuple(given.name for given in self._session.get_outputs())
        self.narrow: Mapping[str, DType] = {
            given.name: _NARROW[given.type]
            for given in self._session.get_inputs()
            if given.type in _NARROW
        }
        self.in_place: Mapping[str, str] = self._in_place(model) if setup == CPU_SETUP else {}

    def run(
        self, given: Mapping[str, Array], wanted: Sequence[str] | None = None
    ) -> dict[str, Array]:
        """Return outputs for some inputs, by name. Inputs that it does not have are ignored.

        Args:
            given: the inputs.
            wanted: which outputs; None for all.

        Raises:
            GraphError: when an input is missing or has another shape or dtype than the graph's.
        """
        missing = [name for name in self.inputs if name not in given]
        if missing:
            raise GraphError(f"the graph also needs {', '.join(missing)}")
        feed = {name: np.ascontiguousarray(given[name]) for name in self.inputs}
        try:
            found = self._session.run(wanted, feed)
        except Exception as error:  # noqa: BLE001 - see above
            raise GraphError(f"the graph cannot be run: {_first_line(error)}") from None
        return dict(zip(wanted or self.outputs, found, strict=True))

    def run_into(
        self,
        given: Mapping[str, Array],
        into: Mapping[str, Array],
        wanted: Sequence[str] | None = None,
    ) -> dict[str, Array]:
        """Return outputs for some inputs, of which some are written in place. On the CPU only.

        Args:
            given: inputs by name, of their shapes; bf16 as uint16.
            into: by output, the array to write it to: that of the input which `in_place` names.
            wanted: which outputs; None for all.

        Raises:
            GraphError: when it cannot be run. What is in `into` is undefined then.
        """
        import onnxruntime

        values, binding = {}, self._session.io_binding()
        make = onnxruntime.OrtValue.ortvalue_from_numpy
        make_narrow = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type
        try:
            for name in self.inputs:
                array, dtype = np.asarray(given[name], order="C"), self.narrow.get(name)
                values[name] = make_narrow(array, _ONNX_ELEMENT[dtype]) if dtype else make(array)
                binding.bind_ortvalue_input(name, values[name])
            for name in wanted or self.outputs:
                if name in into:
                    assert into[name] is given[self.in_place[name]]
                    binding.bind_ortvalue_output(name, values[self.in_place[name]])
                else:
                    binding.bind_output(name)
            self._session.run_with_iobinding(binding)
            found = binding.get_outputs()
        except Exception as error:  # noqa: BLE001 - see above
            raise GraphError(f"the graph cannot be run: {_first_line(error)}") from None
        return {
            name: into[name] if name in into else value.numpy()
            for name, value in zip(wanted or self.outputs, found, strict=True)
        }

    def _in_place(self, model: bytes) -> dict[str, str]:
        """Return the additions whose result has the shape and type of what they add to."""
        try:
            found = additions(model)
        except ProtobufError:  # ONNX Runtime read it, and that is not for this to judge
            return {}
        inputs = {given.name: given for given in self._session.get_inputs()}
        outputs = {made.name: made for made in self._session.get_outputs()}
        return {
            output: name
            for output, name in found.items()
            if outputs[output].type == inputs[name].type == "tensor(float)"
            and outputs[output].shape == inputs[name].shape
            and all(isinstance(size, int) for size in inputs[name].shape)
        }


def _on_cpu(session: Any) -> Counter[str]:
    """Count the operations that the CPU computes, by name."""
    tell = getattr(session, "get_provider_graph_assignment_info", None)
    return Counter(
        node.op_type
        for part in (tell() if tell else ())
        if part.ep_name == CPU_SETUP.runtime_name
        for node in part.get_nodes()
    )


@cache
def _make_shared_memory() -> None:
    """Let ONNX Runtime make the memory that sessions share, once for this process."""
    import onnxruntime as ort

    memory = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    ort.create_and_register_allocator(memory, ort.OrtArenaCfg({"max_mem": 0}))


def _threads() -> int:
    """Return how many threads the environment asks for; 0 for as many as there are cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(asked) if asked.isdigit() else 0


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]
