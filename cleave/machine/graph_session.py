"""A graph that ONNX Runtime can run on this machine."""

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

_NO_MESSAGES: Final = 4  # fatal messages only; failures are raised
_NARROW: Final = {"tensor(bfloat16)": DType.BF16, "tensor(float16)": DType.FP16}
_ONNX_ELEMENT: Final = {DType.BF16: 16, DType.FP16: 10}  # ONNX's numbers of types


def available() -> bool:
    """Return whether graphs can run here, without importing ONNX Runtime."""
    return importlib.util.find_spec("onnxruntime") is not None


class GraphError(CleaveError):
    """A graph cannot be run here."""


class GraphSession:
    """One graph, optimized for this machine.

    Only this class imports ONNX Runtime, which takes 0.25 s and 20 MB.

    Args:
        model: the ONNX model. It cannot contain code or refer to other files.
        threads: number of threads; None for `OMP_NUM_THREADS`, as in numpy and torch, or the number
            of cores.
        setup: the provider; the CPU runs operations that it cannot.
        shares_memory: whether to allocate from memory that such sessions of this process share,
            which is held until the process ends. With separate memory, each of a layer's two
            graphs would hold the memory of its largest run.

    Attributes:
        inputs: the shape of every input by name; the batch size is a string in it.
        outputs: names of the outputs, in order.
        narrow: dtype of each 16-bit input, see `graph_narrowing`.
        in_place: by output that may overwrite an input, the name of that input, see `run_into`.
        on_cpu: counts by name of the operations that the CPU runs in place of the provider; empty
            if ONNX Runtime is too old to report them.

    Raises:
        GraphError: when ONNX Runtime is missing, lacks the provider or refuses the model.
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
        # A memory pattern from the first run is held in addition to that run's memory: 750 MB
        # instead of 450 MB for a layer with 4096 tokens, without saving time.
        options.enable_mem_pattern = False
        if shares_memory:
            _make_shared_memory()
            options.add_session_config_entry("session.use_env_allocators", "1")
        # It would merge a parameter's equal casts, and hold the result from first to last use.
        # Layers exported by torch have no other duplicates. Constant folding would hold results of
        # constants from the start to the end, however large they are.
        disabled = ["CommonSubexpressionElimination", "ConstantFolding"]
        # A graph could name local files as its constants, so use a folder that does not exist.
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path",
            os.path.join(os.devnull, "nothing"),
        )
        # Bytes in ONNX Runtime's own format were not checked, and could contain anything.
        options.add_session_config_entry("session.load_model_format", "ONNX")
        # Spinning threads would slow down other processes of this machine.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        providers = [(setup.runtime_name, dict(setup.options))]
        if setup != CPU_SETUP:
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
            providers.append((CPU_SETUP.runtime_name, {}))
        try:
            # Without the fallback to the CPU, which prints the failure.
            self._session = onnxruntime.InferenceSession(
                model, options, providers, enable_fallback=0, disabled_optimizers=disabled
            )
        except Exception as error:  # noqa: BLE001 - ONNX Runtime has no base class of its errors
            raise GraphError(f"ONNX Runtime refuses the graph: {_first_line(error)}") from None
        if setup.runtime_name not in self._session.get_providers():
            raise GraphError(f"ONNX Runtime cannot load {setup} here")
        self.on_cpu: Mapping[str, int] = _on_cpu(self._session) if setup != CPU_SETUP else {}
        # A size that is not a number is the dynamic batch size.
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
        """Return outputs by name. Inputs that the graph does not have are ignored.

        Args:
            given: inputs by name.
            wanted: names of the outputs to return; None for all.

        Raises:
            GraphError: when an input is missing or has a wrong shape or dtype.
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
        """Return outputs by name, and write some of them in place. On the CPU only.

        Args:
            given: inputs by name, in the graph's shapes; bf16 as uint16.
            into: by output, the array to write to, which must be the input that `in_place` names.
            wanted: names of the outputs to return; None for all.

        Raises:
            GraphError: when the run fails. The content of `into` is undefined then.
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
        """Return the additions that can overwrite an input: fp32, of the input's fixed shape."""
        try:
            found = additions(model)
        except ProtobufError:  # ONNX Runtime accepted the model, which counts
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
    """Count the operations that the CPU runs, by name."""
    tell = getattr(session, "get_provider_graph_assignment_info", None)
    return Counter(
        node.op_type
        for part in (tell() if tell else ())
        if part.ep_name == CPU_SETUP.runtime_name
        for node in part.get_nodes()
    )


@cache
def _make_shared_memory() -> None:
    """Create the allocator that sessions share, once for this process."""
    import onnxruntime as ort

    memory = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    ort.create_and_register_allocator(memory, ort.OrtArenaCfg({"max_mem": 0}))


def _threads() -> int:
    """Return the number of threads that the environment sets; 0 for the number of cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(asked) if asked.isdigit() else 0


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]
